/* shm_word.h - a rank's state as a reader of shards: one word, its transitions, and the waits between ranks.
 *
 * A rank's whole state is one word that only this rank writes. So every transition is one store, every reader sees a
 * consistent state, and each question between two ranks is a pure function of two words. shm_reader.c stores and waits;
 * tests/c/check_reader.c checks all interleavings of the same functions.
 *
 *   reductions (25 bits) | version (20) | training forwards since (12) | mode (1) | dirty (1) | changed (1) | state (4)
 *
 * The counts are compared modulo their size: ranks are never more than a few apart.
 *
 * state    | the rank                                              | may other ranks read it now?
 * IDLE     | is in user code                                       | by passes that it has begun too; by evaluations
 * WRITES   | writes its shards: a step, a load, by hand            | no
 * WANTS_*  | has begun a pass, and waits to be admitted by all     | by those that it admits; by evaluations
 * TRAINS   | reads, in a forward that a backward may follow        | as WANTS_*
 * EVALUATES| reads, in any other forward                           | as WANTS_*
 * BACKWARD | reads, in a backward                                  | as WANTS_*
 * FREED    | has freed the model, with the shards as they were     | like IDLE
 *
 * event                   | from     | to                                       | then waits until
 * a training forward      | any      | WANTS_TRAIN; its count + 1               | all admit it (zs_word_admits)
 * ... admitted            | WANTS_*  | TRAINS                                   |
 * another forward         | any      | WANTS_EVAL                               | all admit it
 * ... admitted            | WANTS_*  | EVALUATES; its looks + 1                 |
 * either, if dirty or     |          | version + 1, and not dirty               |
 * from WRITES             |          |                                          |
 * a forward ends          | these    | IDLE                                     | no rank holds it up
 * (zs_word_holds_up) a backward begins       | any      | WANTS_BACKWARD                           | all admit it
 * ... admitted            |          | BACKWARD                                 |
 * a backward ends         | BACKWARD | IDLE; reductions + 1, the counts 0       | no rank holds it up
 * a write is wanted       | IDLE     | IDLE                                     | no rank lags behind (zs_word_lags)
 * it begins               | IDLE     | WRITES                                   | no rank reads (zs_word_delays_write)
 * a known write ends      | WRITES   | IDLE; version + 1, not dirty             |
 * a write by hand ends    | WRITES   | IDLE; dirty                              |
 * a pass fails halfway    | as it is, until the next one begins                 |
 *
 * A training forward is collective: all ranks run it, so its count shows which ranks have begun it. An evaluation is a
 * look: ranks may make any number of them. The version decides what it may read: how many writes a rank has done since
 * the last backward. Writes that a script does by hand, one parameter after the other, count as one write once a pass
 * or a known write follows; until then the rank is dirty, and no rank looks at it. A late rank must find its own
 * version at its peers, so those that have made more looks wait before they write.
 */
#ifndef ZS_SHM_WORD_H
#define ZS_SHM_WORD_H

#include "comm/comm.h"

/* See the table above. */
typedef enum zs_reader_state {
    ZS_READER_IDLE,
    ZS_READER_WRITES,
    ZS_READER_WANTS_TRAIN,
    ZS_READER_WANTS_EVAL,
    ZS_READER_WANTS_BACKWARD,
    ZS_READER_TRAINS,
    ZS_READER_EVALUATES,
    ZS_READER_BACKWARD,
    ZS_READER_FREED,
} zs_reader_state;

/* The state in a word. */
zs_reader_state zs_word_state(uint64_t word);

/* Number of training forwards since the rank's last backward; for messages. */
uint64_t zs_word_trains(uint64_t word);

/* Number of writes since then; for messages. */
uint64_t zs_word_version(uint64_t word);

/* Had the parameters changed since the last known write when this pass began? */
bool zs_word_changed(uint64_t word);

/* Do two words have the same reductions and version? */
bool zs_word_same_version(uint64_t a, uint64_t b);

/* --- transitions -------------------------------------------------------------------------------------------------- */

/* The word of a rank that has just created the model: no rank may read it before its first known write. */
uint64_t zs_word_new(void);

/* A pass begins; a backward keeps its forward's mode and changes. */
uint64_t zs_word_want(uint64_t word, const zs_reading *reading);

/* The wanted pass has been admitted. */
uint64_t zs_word_enter(uint64_t word);

/* The pass in which `word` reads has ended. */
uint64_t zs_word_leave(uint64_t word);

/* `word` without its pass, which is abandoned; its counts stay, so that no rank waits for passes that have begun. */
uint64_t zs_word_stop(uint64_t word);

/* The model is freed. */
uint64_t zs_word_free(uint64_t word);

/* A write begins; only from IDLE, else `word` stays as it is. */
uint64_t zs_word_write(uint64_t word);

/* It ends. `known`: the write is collective and atomic. */
uint64_t zs_word_wrote(uint64_t word, bool known);

/* The script's writes by hand are complete, as the rank reports when it reaches a collective of the script;
 * `changed`: see zs_reading. Only from IDLE and WRITES, else `word` stays as it is. */
uint64_t zs_word_complete(uint64_t word, bool changed);

/* No rank may read this one before its next pass or known write. */
uint64_t zs_word_mark_dirty(uint64_t word);

/* --- questions ---------------------------------------------------------------------------------------------------- */

/* Has `owner` also begun the training forward that `mine` wants, is in, or has passed? Then its shards are of that
 * moment. */
bool zs_word_takes_part(uint64_t owner, uint64_t mine);

/* May a rank in `mine` (WANTS_*) read the shards of `owner`? */
bool zs_word_admits(uint64_t owner, uint64_t mine);

/* Does that still hold, now that the rank has stored that it reads? `wanted` is its word before. */
bool zs_word_stands_still(uint64_t owner, uint64_t wanted);

/* Does an evaluation in `mine`, which `owner` has admitted, find the same there as on its own rank? `same_work`:
 * scripts have made the same operations by hand on both since their last known writes, before the same passes. */
bool zs_word_is_alike(uint64_t owner, uint64_t mine, bool same_work);

/* Do the weights of `owner`, which has admitted a training forward in `mine`, differ from this rank's? Checked only
 * if the two do not run the same forward in the same mode. */
bool zs_word_clashes(uint64_t owner, uint64_t mine, bool same_work);

/* Must a rank that has ended a pass, and is now IDLE in `mine`, wait for `peer` before it returns to user code? */
bool zs_word_holds_up(uint64_t peer, uint64_t mine);

/* Is `peer` in a pass in which it reads? */
bool zs_word_reads(uint64_t peer);

/* Must a rank in `mine` (IDLE), which has looked at its version, wait before it writes, so that `peer` can make the
 * same looks? `fewer`: `peer` has made fewer, if it has that version. */
bool zs_word_lags(uint64_t peer, uint64_t mine, bool fewer);

/* Must a rank in `mine` (WRITES) wait for `peer` before it writes? Not for a backward that needs this rank's own to
 * end: if a forward has two backwards, of different parts of a model, the step of the first may run between them. */
bool zs_word_delays_write(uint64_t peer, uint64_t mine);

#endif
