/* rounds.c - rounds of gradients: which unit packs into which bucket, when a round is posted, and when it is summed.
 *
 * Rounds are summed in the order of posting, as late as may be: when a bucket is wanted and there is no other, or at
 * the end of the backward. So no rank waits for a peer that is a unit behind. Two buckets of a size are enough for
 * ranks in step; one more is made where every rank would otherwise wait for every other. See schedule.h.
 *
 * A peer may need a round to be ended here, and this rank may be about to wait for that peer elsewhere: in a collective
 * of another model, or of the script. So ranks with the same events in a backward end the same rounds before the same
 * events, independent of timing and of earlier backwards.
 */
#include "schedule/inner.h"

#include <stdlib.h>

/* --- the queue of rounds that are out ----------------------------------------------------------------------------- */

static void enqueue(zs_schedule *schedule, zs_record *record)
{
    record->round.outstanding = true;
    record->round.posted_at = ++schedule->posts;
    record->round.next = NULL;
    if (schedule->first_out == NULL)
        schedule->first_out = record;
    else
        schedule->last_out->round.next = record;
    schedule->last_out = record;
}

static void dequeue(zs_schedule *schedule, zs_record *record)
{
    record->round.outstanding = false;
    zs_record *before = NULL;
    for (zs_record *each = schedule->first_out; each != record; each = each->round.next)
        before = each;
    if (before == NULL)
        schedule->first_out = record->round.next;
    else
        before->round.next = record->round.next;
    if (schedule->last_out == record) schedule->last_out = before;
    record->round.next = NULL;
}

zs_status zs_rounds_prepare(zs_schedule *schedule, zs_record *record, int64_t arriving)
{
    zs_expected expected = {.known = true};
    ZS_TRY(ZS_ACT(schedule, prepare, record, arriving, &expected));
    if (expected.known) return ZS_OK;
    record->round.n_expected = expected.n_wanted;
    record->round.has_frozen = expected.has_frozen;
    if (record->round.local) record->round.n_arrived = 0;
    return ZS_OK;
}

static zs_status share(zs_schedule *schedule, zs_record *record, zs_wait wait)
{
    bool ready = true;
    if (!record->is.replicated || record->round.shared) return ZS_OK;
    if (!schedule->gave_up) ZS_TRY(zs_rounds_prepare(schedule, record, -1));
    ZS_TRY(ZS_ACT(schedule, share, record, wait, &ready));
    record->round.shared = ready;
    return ZS_OK;
}

/* Ends the round of a unit, which is the oldest of those that are out; then its unit may be stepped. */
static zs_status end_round(zs_schedule *schedule, zs_record *record, zs_wait wait, bool *done)
{
    bool over = false;
    *done = false;
    ZS_TRY(share(schedule, record, wait));
    if (record->is.replicated && !record->round.shared) return ZS_OK;
    /* A unit that was not used here may have gradients to set aside. */
    if (!record->is.replicated && !schedule->gave_up) ZS_TRY(zs_rounds_prepare(schedule, record, -1));
    zs_status status = schedule->act->sum(record, wait, done, &over);
    if (!*done) return status;
    dequeue(schedule, record); /* before users' hooks run */
    zs_unshard_reduced(record);
    return status == ZS_OK && over ? ZS_ACT(schedule, step, record) : status;
}

/* Ends rounds in the order of posting, up to the last one of `record`, or until a wait yields. One order on all ranks,
 * so that ranks in step never wait for each other. */
static zs_status end_until(zs_schedule *schedule, const zs_record *record, zs_wait wait)
{
    bool done = true;
    while (done && schedule->first_out != NULL && schedule->first_out->round.posted_at <= record->round.posted_at)
        ZS_TRY(end_round(schedule, schedule->first_out, wait, &done));
    return ZS_OK;
}

void zs_rounds_share_now(zs_schedule *schedule)
{
    for (zs_record *record = schedule->first_out; record != NULL; record = record->round.next)
        (void)share(schedule, record, ZS_WAIT_NOT);
}

zs_status zs_rounds_end_all(zs_schedule *schedule)
{
    zs_status status = ZS_OK;
    for (zs_record *record = schedule->first_out; record != NULL && status == ZS_OK; record = record->round.next)
        status = share(schedule, record, ZS_WAIT);
    if (status != ZS_OK && !schedule->gave_up) return status; /* else the rounds before it can be ended */
    while (schedule->first_out != NULL) {
        bool done = false;
        zs_status one = end_round(schedule, schedule->first_out, ZS_WAIT, &done);
        ZS_ALSO(status, one); /* a round that a peer gave up is over; the others must also end */
        if (one != ZS_OK && !done) break;
    }
    return status;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/* Is its round summed here and read by all peers? Ends rounds for that, according to `wait`. */
static zs_status end_for(zs_schedule *schedule, const zs_lease *lease, zs_wait wait, bool *read)
{
    zs_record *user = lease->user;
    *read = false;
    if (user == NULL) return ZS_OK;
    if (wait != ZS_WAIT_NOT)
        ZS_TRY(end_until(schedule, user, wait));
    else if (user->round.outstanding)
        ZS_TRY(end_round(schedule, user, wait, read));
    *read = false;
    return user->round.outstanding ? ZS_OK : schedule->act->reusable(user, wait, read);
}

static void set_idle(zs_lease *lease)
{
    lease->user->round.out = NULL;
    lease->user = NULL;
    lease->posted = false;
}

static zs_status reclaim(zs_schedule *schedule, zs_lease *lease, zs_wait wait)
{
    bool read;
    ZS_TRY(end_for(schedule, lease, wait, &read));
    if (read) set_idle(lease);
    return ZS_OK;
}

zs_status zs_rounds_settle(zs_schedule *schedule)
{
    for (size_t i = 0; i < schedule->n_leases; i++)
        if (schedule->leases[i]->posted) ZS_TRY(reclaim(schedule, schedule->leases[i], ZS_WAIT));
    return ZS_OK;
}

typedef struct pool_view {
    zs_lease *idle;   /* smallest idle bucket that is large enough */
    zs_lease *oldest; /* large enough bucket that was posted first */
    int fitting;      /* buckets that are large enough */
} pool_view;

static pool_view look(const zs_schedule *schedule, size_t bytes)
{
    pool_view view = {0};
    for (size_t i = 0; i < schedule->n_leases; i++) {
        zs_lease *lease = schedule->leases[i];
        if (lease->bytes < bytes || lease->spare) continue;
        view.fitting++;
        if (lease->user == NULL && !lease->posted && (view.idle == NULL || lease->bytes < view.idle->bytes))
            view.idle = lease;
        if (lease->user == NULL || !lease->posted) continue;
        if (view.oldest == NULL || lease->user->round.posted_at < view.oldest->user->round.posted_at)
            view.oldest = lease;
    }
    return view;
}

zs_status zs_schedule_add_lease(zs_schedule *schedule, zs_lease *lease)
{
    zs_lease **grown = realloc(schedule->leases, (schedule->n_leases + 1) * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating bucket %zu", schedule->n_leases);
    schedule->leases = grown;
    grown[schedule->n_leases++] = lease;
    return ZS_OK;
}

void zs_schedule_drop_lease(zs_schedule *schedule, const zs_lease *lease)
{
    size_t kept = 0;
    for (size_t i = 0; i < schedule->n_leases; i++)
        if (schedule->leases[i] != lease) schedule->leases[kept++] = schedule->leases[i];
    schedule->n_leases = kept;
}

/* Ends all rounds that can be ended now: peers may wait for them. Then frees a bucket that fits and that all peers have
 * read, but only if not all have posted that of `oldest`: so their orders differ, and it may be long until they do.
 * (Where they are the same, a rank would continue with that round open.) */
static zs_status end_early(zs_schedule *schedule, size_t bytes, const zs_lease *oldest)
{
    const zs_round *round = &oldest->user->round;
    zs_lease *found = NULL;
    bool read;
    for (size_t i = 0; i < schedule->n_leases; i++) {
        zs_lease *lease = schedule->leases[i];
        if (!lease->posted || lease == oldest) continue;
        ZS_TRY(end_for(schedule, lease, ZS_WAIT_NOT, &read));
        if (read && lease->bytes >= bytes) found = lease;
    }
    ZS_TRY(end_for(schedule, oldest, ZS_WAIT_NOT, &read)); /* last: it was posted before `found` */
    if (found != NULL && round->outstanding && !round->shared) set_idle(found);
    return ZS_OK;
}

/* A bucket beyond those of the plan, for the rest of this backward. */
static zs_status add_bucket(zs_schedule *schedule, size_t bytes, zs_lease **out)
{
    for (size_t i = 0; i < schedule->n_leases; i++) {
        zs_lease *lease = schedule->leases[i];
        if (!lease->spare || lease->asked != bytes || lease->posted) continue;
        lease->spare = false;
        *out = lease;
        return ZS_OK;
    }
    ZS_TRY(schedule->act->bucket_new(schedule, bytes, out));
    (*out)->asked = bytes;
    return ZS_OK;
}

/* Lends the unit a bucket, ending older rounds where needed. */
static zs_status lend(zs_schedule *schedule, zs_record *record)
{
    size_t bytes = record->is.bucket_bytes;
    pool_view view = look(schedule, bytes);
    int out = schedule->alone ? 1 : ZS_BUCKETS_OUT;
    if (view.idle == NULL && view.fitting >= out && view.oldest != NULL) {
        zs_lease *oldest = view.oldest;
        if (!schedule->in_order)
            ZS_TRY(end_early(schedule, bytes, oldest)); /* collectives end in the order of posting */
        view = look(schedule, bytes);
        /* Comes back without it only if all ranks wait: ranks that differ in order need one bucket more. */
        if (view.idle == NULL) ZS_TRY(reclaim(schedule, oldest, ZS_WAIT_OR_YIELD));
        view = look(schedule, bytes);
    }
    if (view.idle == NULL) ZS_TRY(add_bucket(schedule, bytes, &view.idle));
    view.idle->user = record;
    view.idle->posted = false;
    record->round.packing = view.idle;
    return ZS_OK;
}

static zs_status take_bucket(zs_schedule *schedule, zs_record *record)
{
    /* The sum of a second round in one backward is added to the first one's. */
    ZS_TRY(end_until(schedule, record, ZS_WAIT));
    if (record->round.out != NULL) ZS_TRY(reclaim(schedule, record->round.out, ZS_WAIT));
    return lend(schedule, record);
}

/* Takes the unit's bucket back before it was posted. */
static void drop_bucket(zs_record *record)
{
    if (record->round.packing == NULL) return;
    record->round.packing->user = NULL;
    record->round.packing = NULL;
}

/* --- a round ------------------------------------------------------------------------------------------------------ */

void zs_rounds_begin(zs_schedule *schedule)
{
    for (size_t i = 0; i < schedule->n; i++) {
        zs_record *record = schedule->records[i];
        record->round.syncs = schedule->adds_leaves ? schedule->last_leaf : record->sync;
        record->round.packed = false;
    }
    for (size_t i = 0; i < schedule->n_leases; i++) {
        zs_lease *lease = schedule->leases[i];
        lease->spare = lease->extra;
    }
}

void zs_rounds_called(zs_record *record)
{
    if (record->early.on) record->early.calls++;
}

void zs_rounds_come_back(zs_record *record)
{
    record->early.calls = 0;
}

void zs_record_set_early(zs_record *record, bool on)
{
    record->early = (zs_early){.on = on};
}

static zs_status begin_round(zs_schedule *schedule, zs_record *record, bool local)
{
    if (!local) ZS_TRY(take_bucket(schedule, record));
    zs_status status = ZS_ACT(schedule, begin_round, record, local);
    if (status != ZS_OK) {
        drop_bucket(record); /* it may have no memory */
        return status;
    }
    record->round.local = local;
    record->round.n_arrived = 0;
    return ZS_OK;
}

/* (alone) Stepped where autograd put its gradients, when all are there. */
static zs_status keep(zs_schedule *schedule, zs_record *record, int64_t i)
{
    bool all = false;
    ZS_TRY(ZS_ACT(schedule, keep, record, i, &all));
    if (!record->early.on || !record->round.syncs || record->early.calls > 1 || !all) return ZS_OK;
    record->early.over = true;
    return ZS_ACT(schedule, step, record);
}

zs_status zs_rounds_gradient(zs_schedule *schedule, zs_record *record, int64_t i, bool *complete)
{
    zs_round *round = &record->round;
    bool first = false;
    *complete = false;
    bool stays = record->is.replicated && !round->syncs && !schedule->adds_leaves;
    if (!record->is.reduces || stays) return keep(schedule, record, i);
    ZS_TRY(zs_rounds_prepare(schedule, record, i));
    if (round->packing == NULL && !round->local) ZS_TRY(begin_round(schedule, record, !round->syncs));
    /* The round was complete, and its turn to be posted has not come; a weight that is recomputed once more adds to
     * it. */
    bool anew = round->n_arrived == round->n_expected;
    if (anew) round->n_arrived = 0; /* also if packing fails: then not all has arrived */
    ZS_TRY(schedule->act->pack(record, i, anew, &first));
    round->n_arrived += first;
    *complete = round->n_arrived == round->n_expected;
    return ZS_OK;
}

void zs_rounds_over(zs_record *record)
{
    record->early.calls = 0;
    record->early.over = false;
}

void zs_rounds_packed(zs_record *record)
{
    record->round.packed = true;
}

static void posted(zs_schedule *schedule, zs_record *record)
{
    zs_lease *lease = record->round.packing;
    record->round.posted = true;
    record->round.shared = false;
    enqueue(schedule, record);
    if (lease == NULL) return;
    lease->posted = true;
    record->round.out = lease;
    record->round.packing = NULL;
}

static zs_status post_local(zs_schedule *schedule, zs_record *record)
{
    ZS_TRY(zs_rounds_prepare(schedule, record, -1)); /* it may not have been used in this backward */
    ZS_TRY(take_bucket(schedule, record));
    zs_status status = ZS_ACT(schedule, send_local, record);
    if (status == ZS_OK)
        record->round.local = false;
    else
        drop_bucket(record); /* it may have no memory */
    return status;
}

zs_status zs_rounds_post(zs_schedule *schedule, zs_record *record)
{
    zs_round *round = &record->round;
    zs_early *early = &record->early;
    round->packed = false;
    if (!record->is.reduces || !round->syncs) return ZS_OK;
    if (round->local && !schedule->gave_up) ZS_TRY(post_local(schedule, record));
    bool sends = record->is.replicated || (schedule->adds_leaves && !schedule->gave_up);
    if (round->packing == NULL && sends) {
        ZS_TRY(begin_round(schedule, record, false)); /* there must be room for the sum, or for earlier leaves */
    } else if (round->packing == NULL) {
        ZS_TRY(end_until(schedule, record, ZS_WAIT));
        if (!schedule->gave_up) ZS_TRY(zs_rounds_prepare(schedule, record, -1)); /* earlier gradients are needed */
    }
    /* A full unit has frozen parameters that backward still needs. */
    early->over =
        early->on && early->calls <= 1 && !schedule->gave_up && (record->is.fixed || record->state != ZS_FULL);
    ZS_TRY(schedule->act->post(record));
    posted(schedule, record);
    /* If sharing is a collective as well, sharing at once keeps one order of collectives on all ranks. */
    return record->is.replicated && schedule->in_order ? zs_rounds_end_all(schedule) : ZS_OK;
}

void zs_record_forget_local(zs_record *record)
{
    record->round.local = false;
}

/* --- the end of a backward ---------------------------------------------------------------------------------------- */

zs_status zs_rounds_deliver(zs_schedule *schedule, zs_record *record)
{
    record->round.posted = false;
    return ZS_ACT(schedule, deliver, record);
}

void zs_rounds_drop(zs_schedule *schedule, zs_record *record)
{
    record->round.packed = false;
    drop_bucket(record);
    if (schedule->act->drop != NULL) schedule->act->drop(record);
    record->early.calls = 0; /* a unit that is over stays so until its rounds have ended: others may step it */
}

void zs_rounds_forget_all(zs_schedule *schedule)
{
    for (size_t i = 0; i < schedule->n; i++) {
        zs_rounds_drop(schedule, schedule->records[i]);
        schedule->records[i]->round.posted = false;
    }
    while (schedule->first_out != NULL)
        dequeue(schedule, schedule->first_out);
}

void zs_rounds_forget(zs_schedule *schedule, zs_record *record)
{
    drop_bucket(record);
    if (record->round.outstanding) dequeue(schedule, record);
    if (record->round.out != NULL) record->round.out->user = NULL;
    record->round.out = NULL;
}
