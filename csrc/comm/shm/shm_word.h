/* shm_word.h - a rank's state as a reader of shards: one word, what becomes of it, and who waits for whom.
 *
 * The one idea: a rank's whole state is one word that only it writes. So every transition is one store, whoever looks sees a
 * consistent state, and each question between two ranks is a pure function of two words. shm_reader.c stores and waits;
 * tests/c/check_reader.c goes through all interleavings of the same functions.
 *
 *      reductions (32 bits) | training forwards since (12) | evaluations since (14) | mode (1) | changed (1) | state (4)
 *
 * The counts are compared modulo their size: ranks are never more than a few apart.
 *
 *   state    | the rank                                              | may it be read now?
 *   IDLE     | is in user code                                       | by passes that it has begun too
 *   WRITES   | writes its shards: a step, a load                     | no
 *   WANTS_*  | has begun a pass, and waits to be admitted by all     | by those that it admits
 *   TRAINS   | reads, in a forward that a backward may follow        | likewise
 *   EVALUATES| reads, in any other forward                           | likewise
 *   ALONE    | reads, in a forward that the others do not take part in| likewise
 *   BACKWARD | reads, in a backward                                  | likewise
 *   FREED    | has no such model any more                            | by passes that it has begun too
 *
 *   event                   | from     | to                                       | then waits until
 *   a forward begins        | any      | WANTS_TRAIN, WANTS_EVAL; its count + 1   | all admit it (zs_word_admits)
 *   ... and all take part   | WANTS_*  | TRAINS, EVALUATES                        |
 *   ... and some do not     | WANTS_*  | ALONE; its count - 1                     |
 *   a forward ends          | these    | IDLE                                     | nobody holds it up (zs_word_holds_up)
 *   a backward begins       | any      | WANTS_BACKWARD                           | all admit it
 *   ... admitted            |          | BACKWARD                                 |
 *   a backward ends         | BACKWARD | IDLE; reductions + 1, other counts 0     | nobody holds it up
 *   a write begins          | IDLE     | WRITES                                   | nobody reads (zs_word_delays_write)
 *   a write ends            | WRITES   | IDLE                                     |
 *   a pass fails halfway    | as it is, until the next one begins                 |
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
    ZS_READER_ALONE,
    ZS_READER_BACKWARD,
    ZS_READER_FREED,
} zs_reader_state;

/* The state of a word. */
zs_reader_state zs_word_state(uint64_t word);

/* How many forwards of its kind the rank has begun since its last backward; for messages. */
uint64_t zs_word_forwards(uint64_t word, zs_pass pass);

/* Had the parameters been changed by other means than a write since the last write, when this pass began? */
bool zs_word_changed(uint64_t word);

/* Are the modules of two passes in the same mode, training or evaluation? */
bool zs_word_same_mode(uint64_t a, uint64_t b);

/* Have two ranks begun the same forwards? */
bool zs_word_same_counts(uint64_t a, uint64_t b);

/* --- transitions ------------------------------------------------------------------------------------------------------ */

/* A pass begins; a backward keeps what its forward says of changes and mode. */
uint64_t zs_word_want(uint64_t word, const zs_reading *reading);

/* The wanted pass has been admitted; `alone`: not all take part in it. */
uint64_t zs_word_enter(uint64_t word, bool alone);

/* The pass that `word` reads in has ended. */
uint64_t zs_word_leave(uint64_t word);

/* Whatever `word` wanted or did will not go on; its counts stay, so that nobody waits for what has been begun. */
uint64_t zs_word_stop(uint64_t word);

/* The model is freed. */
uint64_t zs_word_free(uint64_t word);

/* A write begins / ends; only from IDLE / WRITES, else `word` stays as it is. */
uint64_t zs_word_write(uint64_t word);
uint64_t zs_word_wrote(uint64_t word);

/* --- questions ---------------------------------------------------------------------------------------------------------- */

/* Has `owner` begun the pass that `mine` wants, or is in, too? Then its shards are of that moment. */
bool zs_word_takes_part(uint64_t owner, uint64_t mine);

/* May a rank in `mine` (WANTS_*) read the shards of `owner`? */
bool zs_word_admits(uint64_t owner, uint64_t mine);

/* Does that still hold, now that the rank has stored that it reads? `wanted` is what it has wanted. */
bool zs_word_stands_still(uint64_t owner, uint64_t wanted);

/* Must a rank that has ended a pass, and is IDLE in `mine` now, wait for `peer` before it returns to user code? */
bool zs_word_holds_up(uint64_t peer, uint64_t mine);

/* Is `peer` in a pass in which it reads? */
bool zs_word_reads(uint64_t peer);

/* Must a rank in `mine` (WRITES) wait for `peer` before it writes? Not for a backward that needs this rank's own to end: two
 * backwards of one forward, of different parts of a model, may have the step of the first between them. */
bool zs_word_delays_write(uint64_t peer, uint64_t mine);

#endif
