/* schedule_player.h - autograd and an engine for the schedule, played: an executor that logs its actions.
 *
 * It judges them: nothing is bound that was not gathered, packed without a bucket, summed out of order. So a pass is a
 * line of text that can be read. For test_schedule.c alone.
 */
#ifndef ZS_SCHEDULE_PLAYER_H
#define ZS_SCHEDULE_PLAYER_H

#include "one_test.h"
#include "schedule/schedule.h"

enum { MOST_UNITS = 6, MOST_PARAMS = 3, MOST_BUCKETS = 32 };

/* --- the executor ------------------------------------------------------------------------------------------------- */

typedef struct model model;

/* The peers' progress in a round. */
typedef enum peers { NOTHING, POSTED, SHARED, READ } peers;

typedef struct unit {
    zs_record record;
    model *model;
    char name;
    int n_params;
    int version;                      /* of its graph: a forward's events carry it */
    bool under_way, full;             /* its gather; its full buffer */
    bool prepared, open, out, shared; /* its round: begun, posted */
    int n_packed, posted_at;
    peers peers;
    bool held;     /* a view of its full buffer lives */
    int64_t stamp; /* of its last forward; negative: it has no hook */
} unit;

struct model {
    zs_schedule schedule;
    unit units[MOST_UNITS];
    int n;
    zs_lease buckets[MOST_BUCKETS];
    int n_buckets;
    bool session, peers_are_slow; /* peers come only when waited for */
    bool yields;                  /* waits that may yield do so */
    int posts, sums;              /* rounds so far */
    int64_t now;                  /* nodes of the graph */
    int fails_in;                 /* actions until one fails; negative: none does */
    int failures;                 /* that have */
    char log[1 << 14];
};

static unit *unit_of(zs_record *record)
{
    return (unit *)record;
}

static void say(model *m, const char *word, char name)
{
    size_t length = strlen(m->log);
    if (length + 40 > sizeof m->log) m->log[length = 0] = 0;
    snprintf(m->log + length, sizeof m->log - length, name != 0 ? "%s%s %c" : "%s%s", length > 0 ? ", " : "", word,
             name);
}

/* The begin of every action that may fail. */
static zs_status act(model *m, const char *word, char name)
{
    say(m, word, name);
    if (m->fails_in < 0 || m->fails_in-- > 0) return ZS_OK;
    m->failures++;
    return ZS_FAIL(ZS_ERR_PEER, "%s fails", word);
}

static zs_status ready(zs_schedule *schedule, zs_phase phase)
{
    model *m = (model *)schedule;
    CHECK(!m->session);
    return act(m, phase == ZS_PHASE_FORWARD ? "ready" : "ready back", 0);
}

static zs_status open_session(zs_schedule *schedule, const zs_entry *entry)
{
    model *m = (model *)schedule;
    m->session = true;
    return act(m, entry != NULL ? "open" : "open back", 0);
}

static zs_status close_session(zs_schedule *schedule, zs_phase phase)
{
    model *m = (model *)schedule;
    (void)phase;
    for (int i = 0; i < m->n; i++)
        CHECK(!m->units[i].under_way);
    m->session = false;
    return act(m, "close", 0);
}

static zs_status gather(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->model->session && !u->under_way && !u->full && !record->is.fixed);
    ZS_TRY(act(u->model, "gather", u->name));
    u->under_way = true;
    return ZS_OK;
}

static zs_status bind(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->under_way && !u->full);
    u->under_way = false;
    ZS_TRY(act(u->model, "bind", u->name));
    u->full = true;
    return ZS_OK;
}

static zs_status cancel(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->under_way);
    u->under_way = false;
    say(u->model, "cancel", u->name);
    return ZS_OK;
}

static zs_status reshard(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->full);
    u->full = false;
    return act(u->model, "reshard", u->name);
}

static zs_status prepare(zs_record *record, int64_t arriving, zs_expected *out)
{
    unit *u = unit_of(record);
    (void)arriving;
    *out = (zs_expected){.known = u->prepared, .n_wanted = u->n_params};
    u->prepared = true;
    return ZS_OK;
}

static zs_status bucket_new(zs_schedule *schedule, size_t bytes, zs_lease **out)
{
    model *m = (model *)schedule;
    CHECK(m->n_buckets < MOST_BUCKETS);
    ZS_TRY(act(m, "bucket", 0));
    zs_lease *made = &m->buckets[m->n_buckets++];
    *made = (zs_lease){.bytes = bytes, .extra = m->yields};
    *out = made;
    return zs_schedule_add_lease(schedule, made);
}

static zs_status begin_round(zs_record *record, bool local)
{
    unit *u = unit_of(record);
    CHECK(local || record->round.packing != NULL);
    u->n_packed = 0;
    return ZS_OK;
}

static zs_status pack(zs_record *record, int64_t i, bool anew, bool *first)
{
    unit *u = unit_of(record);
    (void)i;
    CHECK(zs_record_is_full(record) && u->prepared);
    CHECK((record->round.packing != NULL) != record->round.local);
    if (record->round.packing != NULL) CHECK(record->round.packing->user == record);
    ZS_TRY(act(u->model, "pack", u->name));
    u->n_packed = anew ? 1 : u->n_packed + 1;
    *first = true;
    return ZS_OK;
}

static zs_status send_local(zs_record *record)
{
    CHECK(record->round.packing != NULL && record->round.local);
    return act(unit_of(record)->model, "send local", unit_of(record)->name);
}

static zs_status post(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->model->session && !u->out && record->is.reduces);
    CHECK(!record->is.replicated || record->round.packing != NULL);
    ZS_TRY(act(u->model, record->round.packing != NULL ? "post" : "post nothing of", u->name));
    u->out = true;
    u->shared = false;
    u->posted_at = u->model->posts++;
    u->peers = NOTHING;
    return ZS_OK;
}

/* Have the peers done this? */
static bool is_there(unit *u, zs_wait wait, peers what)
{
    model *m = u->model;
    if (!m->peers_are_slow) return true;
    if (wait == ZS_WAIT || (wait == ZS_WAIT_OR_YIELD && !m->yields))
        for (int i = 0; i < m->n; i++) {
            unit *older = &m->units[i];
            peers least = older == u ? what : older->posted_at < u->posted_at ? POSTED : NOTHING;
            if (older->peers < least) older->peers = least;
        }
    return u->peers >= what;
}

static zs_status share(zs_record *record, zs_wait wait, bool *done)
{
    unit *u = unit_of(record);
    CHECK(u->out && !u->shared && record->is.replicated);
    *done = is_there(u, wait, POSTED);
    if (!*done) return ZS_OK;
    ZS_TRY(act(u->model, "share", u->name));
    u->shared = true;
    return ZS_OK;
}

static zs_status sum(zs_record *record, zs_wait wait, bool *done, bool *over)
{
    unit *u = unit_of(record);
    CHECK(u->out && u->shared == record->is.replicated);
    for (int i = 0; i < u->model->n && wait != ZS_WAIT_NOT; i++)
        CHECK(!u->model->units[i].out || u->model->units[i].posted_at >= u->posted_at);
    if (!is_there(u, wait, record->is.replicated ? SHARED : POSTED)) return ZS_OK;
    ZS_TRY(act(u->model, "sum", u->name));
    *done = true;
    *over = record->early.over;
    u->out = false;
    u->model->sums++;
    return ZS_OK;
}

static zs_status reusable(zs_record *record, zs_wait wait, bool *done)
{
    CHECK(!unit_of(record)->out && record->round.out != NULL);
    *done = is_there(unit_of(record), wait, READ);
    return ZS_OK;
}

static zs_status step(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(record->early.on && record->early.over && !u->full);
    return act(u->model, "step", u->name);
}

static zs_status deliver(zs_record *record)
{
    CHECK(!unit_of(record)->out);
    unit_of(record)->prepared = false;
    return ZS_OK;
}

static void drop(zs_record *record)
{
    CHECK(record->round.packing == NULL);
    unit_of(record)->prepared = false;
}

static zs_status give_up(zs_schedule *schedule)
{
    return act((model *)schedule, "give up", 0);
}

static zs_status end(zs_schedule *schedule, zs_status reduced, zs_status delivered)
{
    model *m = (model *)schedule;
    say(m, reduced == ZS_OK ? "end" : "end badly", 0);
    return reduced != ZS_OK ? reduced : delivered;
}

static bool held(const zs_record *record)
{
    return ((const unit *)record)->held;
}

static const zs_actions actions = {
    .held = held,
    .ready = ready,
    .open = open_session,
    .close = close_session,
    .gather = gather,
    .bind = bind,
    .cancel = cancel,
    .reshard = reshard,
    .prepare = prepare,
    .bucket_new = bucket_new,
    .begin_round = begin_round,
    .pack = pack,
    .send_local = send_local,
    .post = post,
    .share = share,
    .sum = sum,
    .reusable = reusable,
    .step = step,
    .deliver = deliver,
    .drop = drop,
    .give_up = give_up,
    .end = end,
};

/* --- models ------------------------------------------------------------------------------------------------------- */

static const zs_traits sharded = {.reduces = true, .bucket_bytes = 64};
static const zs_traits zero2 = {.reduces = true, .bucket_bytes = 64, .stays = true};
static const zs_traits whole = {.reduces = true, .bucket_bytes = 64, .replicated = true, .fixed = true};
static const zs_traits outer = {.empty = true};

/* Units a, b, c, ... with one parameter each. `mapped`: as over shm. */
static model *new_model_of(bool mapped, int n, const zs_traits *traits)
{
    model *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    m->fails_in = -1;
    m->peers_are_slow = true;
    m->now = 1;
    m->n = n;
    zs_schedule_init(&m->schedule, &actions);
    zs_schedule_set_transports(&m->schedule, !mapped, !mapped, false);
    for (int i = 0; i < n; i++) {
        unit *u = &m->units[i];
        u->model = m;
        u->name = (char)('a' + i);
        u->n_params = traits[i].empty ? 0 : 1;
        zs_record_init(&u->record, traits[i]);
        OK(zs_schedule_add(&m->schedule, &u->record));
    }
    return m;
}

/* The same, of units by letters: outer, sharded, zero2, whole. */
static model *new_model(bool mapped, const char *letters)
{
    zs_traits traits[MOST_UNITS];
    int n = (int)strlen(letters);
    for (int i = 0; i < n; i++)
        traits[i] = letters[i] == 'o' ? outer : letters[i] == 's' ? sharded : letters[i] == 'z' ? zero2 : whole;
    return new_model_of(mapped, n, traits);
}

static void set_ahead(model *m, int forward, int backward)
{
    zs_schedule_set_ahead(&m->schedule, (const int[2]){forward, backward});
}

static void free_model(model *m)
{
    for (int i = 0; i < m->n; i++) {
        zs_schedule_forget(&m->schedule, &m->units[i].record);
        zs_record_free(&m->units[i].record);
    }
    zs_schedule_free(&m->schedule);
    free(m);
}

static zs_status enter(model *m, int i)
{
    zs_entry entry = {.training = true, .recording = true, .now = m->now++};
    return zs_schedule_enter(&m->schedule, &m->units[i].record, &entry);
}

static zs_status leave(model *m, int i, bool keep)
{
    m->now++;
    m->units[i].stamp = keep ? zs_schedule_stamp(m->units[i].record.span.begun, m->now) : -1;
    return zs_schedule_leave(&m->schedule, &m->units[i].record, keep);
}

/* Unit 0's module holds the others, which run one after the other. */
static zs_status forward(model *m, bool keep)
{
    zs_status status = enter(m, 0);
    for (int i = 1; i < m->n && status == ZS_OK; i++) {
        status = enter(m, i);
        if (status == ZS_OK) status = leave(m, i, keep);
    }
    zs_status left = leave(m, 0, keep);
    return status != ZS_OK ? status : left;
}

static zs_status back(model *m, int i)
{
    unit *u = &m->units[i];
    if (u->stamp < 0) return ZS_OK;
    ZS_TRY(zs_schedule_backward(&m->schedule, &u->record, u->stamp));
    for (int p = 0; p < u->n_params; p++)
        ZS_TRY(zs_schedule_gradient(&m->schedule, &u->record, p));
    return ZS_OK;
}

/* As autograd does: the outermost output's hook first, then the inner ones, from the last to the first. */
static zs_status backward(model *m)
{
    unit *root = &m->units[0];
    zs_status status = zs_schedule_backward(&m->schedule, &root->record, root->stamp);
    for (int i = m->n - 1; i > 0 && status == ZS_OK; i--)
        status = back(m, i);
    for (int p = 0; p < root->n_params && status == ZS_OK; p++)
        status = zs_schedule_gradient(&m->schedule, &root->record, p);
    if (status == ZS_OK) return zs_schedule_end(&m->schedule);
    /* Autograd calls back only if the backward had begun. */
    if (m->schedule.stage == ZS_IN_BACKWARD) zs_schedule_fail(&m->schedule);
    return status;
}

static void says(model *m, const char *expected)
{
    if (strcmp(m->log, expected) != 0) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", m->log, expected);
        exit(1);
    }
    m->log[0] = 0;
}

static void says_of_forward(model *m, bool keep, const char *expected)
{
    m->log[0] = 0;
    OK(forward(m, keep));
    says(m, expected);
}

static void says_of_backward(model *m, const char *expected)
{
    OK(forward(m, true));
    m->log[0] = 0;
    OK(backward(m));
    says(m, expected);
}

#endif
