/* shm_reader.c - who may read whose shards when: the one protocol of the shm transport that is not a plain count.
 *
 * Shards change in user code (an optimizer, load_state_dict, an EMA swap), that is between passes: root forwards and root
 * backwards. Some of these changes are known (the right to write: an optimizer's step, a load), others are not (p.data.copy_).
 * Four promises follow, without a meeting of all ranks for each layer:
 *   1. what a pass reads of a peer that takes part in it was written before the peer began it (never an older version);
 *   2. a rank returns to user code only when nobody reads what the user is about to change (never half-written);
 *   3. while a rank has the right to write, nobody reads its shards;
 *   4. a rank that runs a forward alone reads the same version of all shards, or is told that it cannot: ranks that are not in
 *      the same pass have the same version only if each has what its last write has left.
 *
 * The one idea is in shm_word.h: a rank's state is one word, and who waits for whom is a function of two of them.
 *
 * A forward that is admitted compares pasts (past.h) with all owners: theirs stand still, since each is in a pass. Where they
 * differ it reads nothing, and ends as any other before that is told: then all have compared.
 *
 * A pass that fails halfway leaves its word standing (peers that end a pass wait for it) until the next forward begins:
 * that raises a count and so lets them go.
 */
#include "comm/shm/shm_reader.h"

#include "comm/shm/shm_wait.h"
#include "comm/shm/shm_word.h"

#include <stdlib.h>
#include <string.h>

struct zs_reader {
    uint32_t record; /* offset in the heap */
    uint64_t sample; /* of the shards, at the last forward that counted */
};

static _Atomic uint64_t *own_word(const zs_shm *shm, const zs_reader *reader)
{
    return &zs_shm_reader_at(shm, shm->base.rank, reader->record)->word;
}

zs_status zs_shm_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    zs_reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the reader of '%s'", name);
    zs_status status = zs_shm_record((zs_shm *)comm, sizeof(zs_shm_reader_record), name, &reader->record);
    if (status != ZS_OK) {
        free(reader);
        return status;
    }
    *out = reader;
    return ZS_OK;
}

void zs_shm_reader_free(zs_comm *comm, zs_reader *reader)
{
    if (reader == NULL) return;
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) { /* a freed model reads no more: let the others go */
        _Atomic uint64_t *word = own_word(shm, reader);
        zs_shm_set(shm, word, zs_word_free(atomic_load(word)));
    }
    free(reader);
}

void zs_shm_tell_past(zs_comm *comm, zs_reader *reader, const zs_past *now)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    _Atomic uint64_t *past = zs_shm_reader_at(shm, comm->rank, reader->record)->past;
    uint64_t words[ZS_PAST_WORDS];
    memcpy(words, now, sizeof words);
    for (int i = 0; i < ZS_PAST_WORDS; i++)
        atomic_store(&past[i], words[i]);
}

static zs_past past_of(const zs_shm *shm, const zs_reader *reader, int rank)
{
    const _Atomic uint64_t *past = zs_shm_reader_at(shm, rank, reader->record)->past;
    uint64_t words[ZS_PAST_WORDS];
    for (int i = 0; i < ZS_PAST_WORDS; i++)
        words[i] = atomic_load(&past[i]);
    zs_past found;
    memcpy(&found, words, sizeof found);
    return found;
}

/* --- passes ------------------------------------------------------------------------------------------------------------- */

/* All owners stand in a pass, or are at the end of one: they have the past that they had when they began, unless a step within a
 * pass has told of itself. */
static zs_status compare_pasts(zs_shm *shm, const zs_reader *reader)
{
    zs_past pasts[shm->base.world];
    for (int r = 0; r < shm->base.world; r++) {
        pasts[r] = past_of(shm, reader, r);
        pasts[r].grads = 0; /* a forward reads none */
    }
    return zs_comm_check_pasts(&shm->base, pasts);
}

/* Reads no more, and comes back when nobody reads what is this rank's. */
static zs_status leave(zs_shm *shm, const zs_reader *reader, uint64_t next)
{
    zs_shm_set(shm, own_word(shm, reader), next);
    zs_shm_act act = zs_shm_act_make(ZS_SHM_LEFT_ALONE, reader->record, 0);
    zs_shm_note(shm, act);
    return zs_shm_wait(shm, act);
}

/* Is it true of all ranks, as seen by this one in `mine`? */
static bool all(const zs_shm *shm, const zs_reader *reader, bool (*question)(uint64_t, uint64_t), uint64_t mine)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && !question(atomic_load(&zs_shm_reader_at(shm, r, reader->record)->word), mine))
            return false;
    return true;
}

/* May this rank go on, with a forward that other ranks do not run, or in another mode? If all have what their last write left
 * there, or all have what they had in the last forward that they ran together. */
static zs_status check_apart(const zs_shm *shm, const zs_reader *reader, uint64_t mine, uint64_t sample)
{
    bool apart = zs_word_state(mine) == ZS_READER_ALONE, level = apart && sample == reader->sample;
    int changed = -1;
    for (int r = 0; r < shm->base.world; r++) {
        uint64_t word = atomic_load(&zs_shm_reader_at(shm, r, reader->record)->word);
        apart |= !zs_word_same_mode(word, mine);
        level &= zs_word_same_counts(word, mine);
        if (changed < 0 && zs_word_changed(word)) changed = r;
    }
    return apart && !level && changed >= 0 ? zs_comm_fail_apart(&shm->base, changed) : ZS_OK;
}

/* Waits for all to admit the pass that is wanted, and reads. */
static zs_status enter(zs_shm *shm, const zs_reader *reader, zs_shm_act act)
{
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t wanted = atomic_load(word);
    for (;;) {
        ZS_TRY(zs_shm_wait(shm, act));
        bool alone = act.what != ZS_SHM_BACKWARD && !all(shm, reader, zs_word_takes_part, wanted);
        atomic_store(word, zs_word_enter(wanted, alone));
        if (alone) zs_shm_wake(shm); /* some wait for just that */
        if (all(shm, reader, zs_word_stands_still, wanted)) return ZS_OK;
        zs_shm_set(shm, word, wanted);
    }
}

/* The pass has come to nothing. Others may have been admitted, and are to compare before this rank goes on. */
static void come_to_nothing(zs_shm *shm, const zs_reader *reader)
{
    uint64_t now = atomic_load(own_word(shm, reader));
    if (zs_word_reads(now))
        (void)leave(shm, reader, zs_word_stop(now));
    else
        zs_shm_set(shm, own_word(shm, reader), zs_word_stop(now)); /* nobody should wait for its end */
}

zs_status zs_shm_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t wanted = zs_word_want(atomic_load(word), reading);
    static const zs_shm_what acts[] = {ZS_SHM_FORWARD, ZS_SHM_EVALUATION, ZS_SHM_BACKWARD};
    zs_shm_act act = zs_shm_act_make(acts[reading->pass], reader->record, zs_word_forwards(wanted, reading->pass));
    zs_shm_note(shm, act);
    zs_shm_set(shm, word, wanted);
    zs_status status = enter(shm, reader, act);
    uint64_t mine = atomic_load(word);
    bool forward = reading->pass != ZS_PASS_BACKWARD;
    if (status == ZS_OK && forward) status = check_apart(shm, reader, mine, reading->sample);
    if (status == ZS_OK && forward) status = compare_pasts(shm, reader);
    if (forward && zs_word_state(mine) != ZS_READER_ALONE) reader->sample = reading->sample;
    if (status != ZS_OK) come_to_nothing(shm, reader);
    return status;
}

zs_status zs_shm_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    uint64_t word = atomic_load(own_word(shm, reader));
    bool backward = zs_word_state(word) == ZS_READER_BACKWARD;
    if (!zs_word_reads(word) || backward != (phase == ZS_PHASE_BACKWARD))
        return ZS_FAIL(ZS_ERR_STATE, "'%s': cannot end a %s that has not begun",
                       zs_shm_reader_at(shm, comm->rank, reader->record)->name,
                       phase == ZS_PHASE_FORWARD ? "forward" : "backward");
    return leave(shm, reader, zs_word_leave(word));
}

/* --- writes -------------------------------------------------------------------------------------------------------------- */

zs_status zs_shm_write_begin(zs_comm *comm, zs_reader *reader)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t now = atomic_load(word), next = zs_word_write(now);
    if (next == now) return ZS_OK;
    atomic_store(word, next); /* nobody waits for this change */
    zs_status status = zs_shm_wait(shm, zs_shm_act_make(ZS_SHM_UNREAD, reader->record, 0));
    if (status != ZS_OK) zs_shm_write_end(comm, reader);
    return status;
}

void zs_shm_write_end(zs_comm *comm, zs_reader *reader)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t now = atomic_load(word), next = zs_word_wrote(now);
    if (next != now) zs_shm_set(shm, word, next);
}
