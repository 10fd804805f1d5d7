/* shm_reader.c - the right to read shards: the one protocol of the shm transport that is not a plain count.
 *
 * Shards change in user code (an optimizer, load_state_dict, an EMA swap), that is, between passes: root forwards and
 * root backwards. Every change takes the right to write first: an optimizer's step, a load, an in-place operation of
 * the script. This gives four guarantees, without a barrier of all ranks for each layer:
 * 1. a pass reads, from a peer that takes part in it, values written before the peer began it (never an older version);
 *   2. a rank returns from a pass that others run as well only when no rank reads in that pass any more;
 *   3. while a rank has the right to write, no rank reads its shards;
 *   4. a rank that evaluates reads its own version of all shards, or fails, in any state of the others.
 *
 * The central idea is in shm_word.h: a rank's state is one word, and waits between two ranks are a function of two
 * words.
 *
 * A forward that is admitted compares fingerprints (fingerprint.h) with all owners: theirs do not change, since none
 * writes. If they differ it reads nothing, and ends normally before it reports that: then all have compared.
 *
 * A pass that fails halfway leaves its word in place (peers that end a pass wait for it) until the next forward
 * begins: that raises a count, which releases them. */
#include "comm/shm/shm_reader.h"

#include "base/fold.h"
#include "comm/shm/shm.h"
#include "comm/shm/shm_word.h"
#include "comm/where.h"

#include <stdlib.h>
#include <string.h>

struct zs_reader {
    uint32_t record; /* offset in the heap */
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
    atomic_store(own_word((zs_shm *)comm, reader), zs_word_new());
    *out = reader;
    return ZS_OK;
}

void zs_shm_reader_free(zs_comm *comm, zs_reader *reader)
{
    if (reader == NULL) return;
    zs_shm *shm = (zs_shm *)comm;
    if (zs_shm_live(shm)) { /* a freed model reads no more: release the others */
        _Atomic uint64_t *word = own_word(shm, reader);
        zs_shm_set(shm, word, zs_word_free(atomic_load(word)));
    }
    free(reader);
}

void zs_shm_publish_fingerprint(zs_comm *comm, zs_reader *reader, const zs_fingerprint *now)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    _Atomic uint64_t *fingerprint = zs_shm_reader_at(shm, comm->rank, reader->record)->fingerprint;
    uint64_t words[ZS_FINGERPRINT_WORDS];
    memcpy(words, now, sizeof words);
    for (int i = 0; i < ZS_FINGERPRINT_WORDS; i++)
        atomic_store(&fingerprint[i], words[i]);
}

static zs_fingerprint fingerprint_of(const zs_shm *shm, const zs_reader *reader, int rank)
{
    const _Atomic uint64_t *fingerprint = zs_shm_reader_at(shm, rank, reader->record)->fingerprint;
    uint64_t words[ZS_FINGERPRINT_WORDS];
    for (int i = 0; i < ZS_FINGERPRINT_WORDS; i++)
        words[i] = atomic_load(&fingerprint[i]);
    zs_fingerprint found;
    memcpy(&found, words, sizeof found);
    return found;
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

/* No owner writes, and each has published its acts before the state that this pass reads. */
static zs_status compare_fingerprints(zs_shm *shm, const zs_reader *reader, zs_pass pass)
{
    zs_fingerprint fingerprints[shm->base.world];
    for (int r = 0; r < shm->base.world; r++) {
        fingerprints[r] = fingerprint_of(shm, reader, r);
        fingerprints[r].grads = 0;                                /* a forward needs none */
        if (pass == ZS_PASS_EVALUATE) fingerprints[r].frozen = 0; /* which training forwards report */
    }
    return (pass == ZS_PASS_EVALUATE ? zs_comm_check_look : zs_comm_check_fingerprints)(&shm->base, fingerprints);
}

static uint64_t work_of(const zs_shm *shm, const zs_reader *reader, int r)
{
    return atomic_load(&zs_shm_reader_at(shm, r, reader->record)->work);
}

static void set_work(zs_shm *shm, const zs_reader *reader, uint64_t work)
{
    atomic_store(&zs_shm_reader_at(shm, shm->base.rank, reader->record)->work, work);
}

/* Earlier operations do not count with later ones. */
static void settle_work(zs_shm *shm, const zs_reader *reader, zs_pass pass)
{
    set_work(shm, reader, zs_fold(work_of(shm, reader, shm->base.rank), (uint64_t)pass));
}

static _Atomic uint64_t *own_looks(const zs_shm *shm, const zs_reader *reader)
{
    return &zs_shm_reader_at(shm, shm->base.rank, reader->record)->looks;
}

/* Stores this rank's word, and wakes peers. */
static void set_word(zs_shm *shm, const zs_reader *reader, uint64_t next)
{
    _Atomic uint64_t *word = own_word(shm, reader), *looks = own_looks(shm, reader);
    if (!zs_word_same_version(atomic_load(word), next)) atomic_store(looks, zs_shm_meetings(atomic_load(looks)) << 32);
    zs_shm_set(shm, word, next);
}

/* Stops reading, and returns when no rank reads this rank's shards. */
static zs_status leave(zs_shm *shm, const zs_reader *reader, uint64_t next)
{
    set_word(shm, reader, next);
    zs_shm_act act = zs_shm_act_make(ZS_SHM_LEFT_ALONE, reader->record, 0);
    zs_shm_note(shm, act);
    return zs_shm_wait(shm, act);
}

/* Does it hold for all ranks, as seen by this one in `mine`? */
static bool all(const zs_shm *shm, const zs_reader *reader, bool (*question)(uint64_t, uint64_t), uint64_t mine)
{
    for (int r = 0; r < shm->base.world; r++)
        if (r != shm->base.rank && !question(atomic_load(&zs_shm_reader_at(shm, r, reader->record)->word), mine))
            return false;
    return true;
}

static uint64_t word_of(const zs_shm *shm, const zs_reader *reader, int r)
{
    return atomic_load(&zs_shm_reader_at(shm, r, reader->record)->word);
}

/* Fails if a rank's weights, according to its word, differ from those of this rank, which reads them in `mine`. */
static zs_status check_weights(zs_shm *shm, const zs_reader *reader, uint64_t mine)
{
    uint64_t work = work_of(shm, reader, shm->base.rank);
    for (int r = 0; r < shm->base.world; r++) {
        uint64_t word = word_of(shm, reader, r);
        bool evaluates = zs_word_state(mine) == ZS_READER_EVALUATES, same = work_of(shm, reader, r) == work;
        if (r == shm->base.rank) continue;
        if (evaluates ? zs_word_is_alike(word, mine, same) : !zs_word_clashes(word, mine, same)) continue;
        return zs_comm_locate(&shm->base, zs_comm_fail_apart(&shm->base, zs_word_changed(mine) ? shm->base.rank : r));
    }
    return ZS_OK;
}

/* Waits until all admit the pass, and reads. */
static zs_status enter(zs_shm *shm, const zs_reader *reader, zs_shm_act act)
{
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t wanted = atomic_load(word);
    for (;;) {
        ZS_TRY(zs_shm_wait(shm, act));
        atomic_store(word, zs_word_enter(wanted));
        if (all(shm, reader, zs_word_stands_still, wanted)) return ZS_OK;
        zs_shm_set(shm, word, wanted);
    }
}

/* Abandons the pass. Others may have been admitted, and must compare before this rank continues. */
static void come_to_nothing(zs_shm *shm, const zs_reader *reader)
{
    uint64_t now = atomic_load(own_word(shm, reader));
    if (zs_word_reads(now))
        (void)leave(shm, reader, zs_word_stop(now));
    else
        zs_shm_set(shm, own_word(shm, reader), zs_word_stop(now)); /* no rank should wait for its end */
}

/* A forward reads: do all ranks have the same parameters as this rank? */
static zs_status check_forward(zs_shm *shm, const zs_reader *reader, zs_pass pass)
{
    uint64_t mine = atomic_load(own_word(shm, reader));
    if (pass == ZS_PASS_TRAIN) ZS_TRY(check_weights(shm, reader, mine));
    ZS_TRY(compare_fingerprints(shm, reader, pass));
    if (pass == ZS_PASS_TRAIN) return ZS_OK;
    ZS_TRY(check_weights(shm, reader, mine));
    _Atomic uint64_t *looks = own_looks(shm, reader);
    zs_shm_set(shm, looks, atomic_load(looks) + 1);
    return ZS_OK;
}

zs_status zs_shm_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t wanted = zs_word_want(atomic_load(word), reading);
    static const zs_shm_what acts[] = {ZS_SHM_FORWARD, ZS_SHM_EVALUATION, ZS_SHM_BACKWARD};
    uint64_t number = reading->pass == ZS_PASS_EVALUATE ? zs_word_version(wanted) : zs_word_trains(wanted);
    zs_shm_act act = zs_shm_act_make(acts[reading->pass], reader->record, number);
    zs_shm_note(shm, act);
    if (!zs_word_same_version(wanted, atomic_load(word))) settle_work(shm, reader, reading->pass);
    set_word(shm, reader, wanted);
    zs_status status = enter(shm, reader, act);
    if (status == ZS_OK && reading->pass != ZS_PASS_BACKWARD) status = check_forward(shm, reader, reading->pass);
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

/* --- writes ------------------------------------------------------------------------------------------------------- */

zs_status zs_shm_write_begin(zs_comm *comm, zs_reader *reader)
{
    zs_shm *shm = (zs_shm *)comm;
    ZS_TRY(zs_shm_usable(shm));
    _Atomic uint64_t *word = own_word(shm, reader);
    uint64_t now = atomic_load(word), next = zs_word_write(now);
    if (next == now) return ZS_OK;
    ZS_TRY(zs_shm_wait(shm, zs_shm_act_make(ZS_SHM_CAUGHT_UP, reader->record, 0)));
    zs_shm_set(shm, word, next); /* a rank that has looked alone may wait for this */
    zs_status status = zs_shm_wait(shm, zs_shm_act_make(ZS_SHM_UNREAD, reader->record, 0));
    if (status != ZS_OK) zs_shm_set(shm, word, now);
    return status;
}

void zs_shm_write_end(zs_comm *comm, zs_reader *reader, bool known)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    set_work(shm, reader, known ? 0 : work_of(shm, reader, comm->rank) + 1);
    set_word(shm, reader, zs_word_wrote(atomic_load(own_word(shm, reader)), known));
}

void zs_shm_write_complete(zs_comm *comm, zs_reader *reader, bool changed)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    uint64_t word = atomic_load(own_word(shm, reader)), next = zs_word_complete(word, changed);
    if (next == word) return;
    if (!zs_word_same_version(word, next))
        settle_work(shm, reader, ZS_PASS_EVALUATE); /* as a rank does that looks now */
    set_word(shm, reader, next);
}

void zs_shm_readers_barrier(zs_comm *comm, zs_reader *reader)
{
    zs_shm *shm = (zs_shm *)comm;
    if (!zs_shm_live(shm)) return;
    _Atomic uint64_t *looks = own_looks(shm, reader);
    zs_shm_set(shm, looks,
               (zs_shm_meetings(atomic_load(looks)) + 1) << 32); /* a rank that writes first may wait for this */
}
