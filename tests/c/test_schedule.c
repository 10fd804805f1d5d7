/* test_schedule.c - the schedule by itself: events in, actions out. See csrc/schedule/schedule.h.
 *
 * The one idea: this executor writes down what it is told to do, as words, and judges it: nothing is bound that was not
 * gathered, packed without a bucket, summed out of order. So a pass is a line of text that can be read, and random passes,
 * with failures in them, are judged by the same rules. `test_schedule NAME` runs one test.
 */
#include "schedule/schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_UNITS = 6, MOST_PARAMS = 3, MOST_BUCKETS = 16 };

#define CHECK(condition)                                                                                           \
    do {                                                                                                           \
        if (!(condition)) {                                                                                        \
            fprintf(stderr, "%s:%d: %s\n    last error: %s\n", __FILE__, __LINE__, #condition, zs_last_message()); \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

#define OK(call) CHECK((call) == ZS_OK)

/* --- the executor --------------------------------------------------------------------------------------------------------- */

typedef struct model model;

typedef struct unit {
    zs_record record;
    model *model;
    char name;
    int n_params;
    int version;                      /* of its graph: a forward's events carry it */
    bool under_way, full;             /* its gather; its full buffer */
    bool prepared, open, out, shared; /* its round: begun, posted */
    int n_packed, posted_at;
    int64_t stamp; /* of its last forward; negative: it has no hook */
} unit;

struct model {
    zs_schedule schedule;
    unit units[MOST_UNITS];
    int n;
    zs_lease buckets[MOST_BUCKETS];
    int n_buckets;
    bool session, peers_are_slow;
    int posts, sums; /* rounds so far */
    int64_t now;     /* nodes of the graph */
    int fails_in;    /* actions until one fails; negative: none does */
    int failures;    /* that have */
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

/* What every action that may fail begins with. */
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

static void cancel(zs_record *record)
{
    unit *u = unit_of(record);
    CHECK(u->under_way);
    u->under_way = false;
    say(u->model, "cancel", u->name);
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
    *made = (zs_lease){.bytes = bytes};
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
    return ZS_OK;
}

static bool is_there(const model *m, zs_wait wait)
{
    return wait != ZS_WAIT_NOT || !m->peers_are_slow;
}

static zs_status share(zs_record *record, zs_wait wait, bool *done)
{
    unit *u = unit_of(record);
    CHECK(u->out && !u->shared && record->is.replicated);
    *done = is_there(u->model, wait);
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
    if (!is_there(u->model, wait)) return ZS_OK;
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
    *done = is_there(unit_of(record)->model, wait);
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

static const zs_actions actions = {
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

/* --- models ----------------------------------------------------------------------------------------------------------------- */

static const zs_traits sharded = {.reduces = true, .bucket_bytes = 64};
static const zs_traits zero2 = {.reduces = true, .bucket_bytes = 64, .stays = true};
static const zs_traits whole = {.reduces = true, .bucket_bytes = 64, .replicated = true, .fixed = true};
static const zs_traits outer = {.empty = true};

/* Units a, b, c, ... with one parameter each. `mapped`: as over shm. */
static model *new_model(bool mapped, int n, const zs_traits *traits)
{
    model *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    m->fails_in = -1;
    m->peers_are_slow = true;
    m->now = 1;
    m->n = n;
    zs_schedule_init(&m->schedule, &actions);
    zs_schedule_set_transports(&m->schedule, !mapped, !mapped);
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
    m->units[i].stamp = keep ? zs_schedule_stamp(&m->units[i].record, m->now) : -1;
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

/* As autograd does: the outermost output's hook first, then what is within, from the last to the first. */
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

/* --- passes ------------------------------------------------------------------------------------------------------------------- */

static void where_shards_are_mapped(void)
{
    const zs_traits traits[] = {outer, sharded, sharded};
    model *m = new_model(true, 3, traits);
    OK(forward(m, true));
    says(m,
         "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, reshard a, close");
    OK(backward(m));
    says(m,
         "ready back, open back, gather a, bind a, gather c, bind c, bucket, pack c, post c, gather b, bind b, bucket, "
         "pack b, post b, reshard a, reshard b, reshard c, sum c, sum b, close, end");
    free_model(m);
}

static void gathers_go_ahead(void)
{
    const zs_traits traits[] = {sharded, sharded, sharded};
    model *m = new_model(false, 3, traits);
    const int ahead[2] = {1, 1};
    zs_schedule_set_ahead(&m->schedule, ahead);
    OK(forward(m, true));
    says(m, "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, close");
    OK(backward(m));
    m->log[0] = 0;
    OK(forward(m, true));
    says(m, "ready, open, gather a, bind a, gather b, bind b, gather c, reshard b, bind c, reshard c, close");
    OK(backward(m));
    /* c is given out where b's backward begins; b where the backward ends, as it may be used in the root's forward. Of a
     * size there are two buckets, so c is summed before a packs. */
    says(m,
         "ready back, open back, gather c, bind c, gather b, pack c, reshard c, post c, bind b, pack b, sum c, pack a, "
         "post b, post a, reshard a, reshard b, sum b, sum a, close, end");
    free_model(m);
}

static void zero2_gathers_once(void)
{
    const zs_traits traits[] = {zero2, zero2};
    model *m = new_model(false, 2, traits);
    OK(forward(m, true));
    says(m, "ready, open, gather a, bind a, gather b, bind b, close");
    OK(forward(m, false)); /* whose backward never comes: what was left is resharded first */
    says(m, "ready, reshard a, reshard b, open, gather a, bind a, gather b, bind b, reshard b, reshard a, close");
    free_model(m);
}

static void whole_units_share_at_once_in_order(void)
{
    const zs_traits traits[] = {whole, whole};
    model *m = new_model(false, 2, traits);
    OK(forward(m, true));
    OK(backward(m));
    says(m,
         "ready, open, close, ready back, open back, bucket, pack b, post b, share b, sum b, bucket, pack a, post a, "
         "share a, sum a, close, end");
    free_model(m);
}

static void gradients_that_stay_go_later(void)
{
    const zs_traits traits[] = {outer, sharded};
    model *m = new_model(true, 2, traits);
    zs_record_set_sync(&m->units[1].record, false);
    OK(forward(m, true));
    OK(backward(m));
    CHECK(m->posts == 0 && m->units[1].record.round.local);
    zs_record_set_sync(&m->units[1].record, true);
    OK(forward(m, true));
    m->log[0] = 0;
    OK(backward(m));
    says(m,
         "ready back, open back, gather a, bind a, gather b, bind b, pack b, bucket, send local b, post b, reshard a, "
         "reshard b, sum b, close, end");
    free_model(m);
}

static void stepped_as_soon_as_it_is_summed(void)
{
    const zs_traits traits[] = {outer, sharded, sharded};
    model *m = new_model(true, 3, traits);
    m->peers_are_slow = false;
    for (int i = 1; i < 3; i++)
        zs_record_set_early(&m->units[i].record, true);
    OK(forward(m, true));
    m->log[0] = 0;
    OK(backward(m));
    says(m, "ready back, open back, gather a, bind a, gather c, bind c, bucket, pack c, reshard c, post c, gather b, "
            "bind b, "
            "sum c, step c, pack b, reshard b, post b, reshard a, sum b, step b, close, end");
    free_model(m);
}

static void pinned_units_stay(void)
{
    const zs_traits traits[] = {outer, sharded};
    model *m = new_model(true, 2, traits);
    zs_entry by_hand = {.by_hand = true, .now = m->now};
    OK(zs_schedule_enter(&m->schedule, NULL, &by_hand));
    OK(zs_schedule_unshard(&m->schedule, &m->units[1].record));
    zs_schedule_pin(&m->units[1].record);
    OK(zs_schedule_leave_by_hand(&m->schedule));
    OK(forward(m, false));
    says(m, "ready, open, gather b, bind b, close, ready, open, gather a, bind a, reshard a, close");
    OK(zs_schedule_reshard(&m->schedule, &m->units[1].record));
    says(m, "reshard b");
    free_model(m);
}

/* --- what fails --------------------------------------------------------------------------------------------------------------- */

static void a_forward_that_fails_closes_what_it_opened(void)
{
    const zs_traits traits[] = {outer, sharded};
    model *m = new_model(true, 2, traits);
    m->fails_in = 4; /* the gather of b */
    CHECK(forward(m, true) == ZS_ERR_PEER);
    zs_clear_error();
    CHECK(m->schedule.n_open == 0 && m->schedule.stage == ZS_IDLE && !m->session && m->units[1].record.inside == 0);
    says(m, "ready, open, gather a, bind a, gather b, reshard a, close");
    free_model(m);
}

static void a_backward_that_raises_is_settled_before_all_else(void)
{
    const zs_traits traits[] = {outer, sharded, sharded};
    model *m = new_model(false, 3, traits);
    OK(forward(m, true));
    m->log[0] = 0;
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    OK(back(m, 2));
    zs_schedule_fail(&m->schedule);
    says(m, "ready back, open back, gather c, bind c, bucket, pack c, reshard a, reshard c");
    OK(forward(m, false));
    says(
        m,
        "give up, close, end, ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, "
        "reshard a, close");
    free_model(m);
}

static void one_that_raises_late_has_missed_nothing(void)
{
    const zs_traits traits[] = {outer, sharded};
    model *m = new_model(true, 2, traits);
    OK(forward(m, true));
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    CHECK(!zs_schedule_all_arrived(&m->schedule));
    OK(back(m, 1));
    CHECK(zs_schedule_all_arrived(&m->schedule));
    OK(zs_schedule_end(&m->schedule));
    free_model(m);
}

/* A weight that is recomputed once more adds to a round that is complete; if that fails, the round is not. */
static void a_round_is_complete_no_more_if_packing_fails(void)
{
    const zs_traits traits[] = {outer, sharded, sharded};
    model *m = new_model(false, 3, traits);
    OK(forward(m, true));
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    OK(back(m, 2));
    OK(back(m, 1)); /* neither is posted: their turn comes where the backward ends */
    CHECK(zs_schedule_all_arrived(&m->schedule));
    m->fails_in = 0;
    CHECK(zs_schedule_gradient(&m->schedule, &m->units[1].record, 0) == ZS_ERR_PEER);
    zs_clear_error();
    CHECK(!zs_schedule_all_arrived(&m->schedule));
    zs_schedule_fail(&m->schedule);
    OK(zs_schedule_settle(&m->schedule));
    free_model(m);
}

static void a_unit_that_was_entered_elsewhere_may_leave(void)
{
    const zs_traits traits[] = {outer, sharded};
    model *m = new_model(true, 2, traits), *other = new_model(true, 1, traits);
    zs_record *record = &m->units[1].record;
    OK(enter(m, 1));
    CHECK(zs_schedule_leave(&other->schedule, record, false) == ZS_OK);
    CHECK(record->inside == 0 && record->state == ZS_SHARDED && other->schedule.n_open == 0);
    OK(zs_schedule_unwind(&m->schedule, 0));
    free_model(other);
    free_model(m);
}

static void units_that_die_are_forgotten(void)
{
    const zs_traits traits[] = {outer, sharded, sharded};
    model *m = new_model(false, 3, traits);
    OK(forward(m, true));
    OK(enter(m, 0));
    OK(enter(m, 1));
    zs_record *gone = &m->units[1].record;
    zs_schedule_forget(&m->schedule, gone);
    CHECK(m->schedule.n == 2 && m->schedule.n_open == 2 && m->schedule.open[1] == NULL);
    CHECK(m->schedule.latest != gone && m->units[0].record.next[0] != gone);
    OK(leave(m, 0, false));
    CHECK(m->schedule.n_open == 0);
    zs_record_free(gone);
    m->units[1] = (unit){.model = m};
    zs_record_init(&m->units[1].record, outer);
    free_model(m);
}

/* --- random passes ------------------------------------------------------------------------------------------------------------ */

static unsigned draw(unsigned *seed, unsigned n)
{
    *seed = *seed * 1103515245u + 12345u;
    return (*seed >> 16) % n;
}

static model *random_model(unsigned *seed)
{
    static const zs_traits *const kinds[] = {&sharded, &zero2, &whole};
    zs_traits traits[MOST_UNITS] = {outer};
    int n = 2 + (int)draw(seed, MOST_UNITS - 1);
    const zs_traits *kind = kinds[draw(seed, 3)];
    for (int i = draw(seed, 2) ? 0 : 1; i < n; i++) {
        traits[i] = *kind;
        traits[i].bucket_bytes = 64 * (1 + draw(seed, 3));
    }
    model *m = new_model(draw(seed, 2), n, traits);
    const int ahead[2] = {(int)draw(seed, 3), (int)draw(seed, 3)};
    zs_schedule_set_ahead(&m->schedule, ahead);
    m->peers_are_slow = draw(seed, 2);
    for (int i = 0; i < n; i++) {
        if (m->units[i].n_params > 0) m->units[i].n_params = 1 + (int)draw(seed, MOST_PARAMS);
        zs_record_set_early(&m->units[i].record, traits[i].reduces && draw(seed, 4) == 0);
    }
    return m;
}

/* Between passes nothing is open, and after a good backward nothing is out. */
static void check_rest(const model *m, bool reduced)
{
    CHECK(m->schedule.n_open == 0 && !m->session && m->schedule.stage != ZS_IN_FORWARD);
    for (int i = 0; i < m->n; i++) {
        const unit *u = &m->units[i];
        CHECK(!u->under_way && u->record.inside == 0 && u->full == (u->record.state == ZS_FULL && !u->record.is.fixed));
        if (!reduced) continue;
        CHECK(!u->full && !u->out && !u->record.round.outstanding && u->record.round.packing == NULL);
    }
    for (int i = 0; i < m->n_buckets && reduced; i++)
        CHECK(m->buckets[i].user == NULL && !m->buckets[i].posted);
}

static void random_step(model *m, unsigned *seed)
{
    bool syncs = draw(seed, 4) > 0;
    for (int i = 0; i < m->n; i++)
        zs_record_set_sync(&m->units[i].record, syncs);
    m->fails_in = draw(seed, 3) == 0 ? (int)draw(seed, 30) : -1;
    zs_status status = forward(m, draw(seed, 4) > 0);
    if (m->failures == 0) CHECK(status == ZS_OK);
    if (m->schedule.stage == ZS_IDLE) check_rest(m, false);
    if (status != ZS_OK || m->units[0].stamp < 0) return;
    status = backward(m);
    if (m->failures == 0) CHECK(status == ZS_OK);
    if (status == ZS_OK && m->failures == 0) check_rest(m, true);
}

static void random_passes_keep_the_rules(void)
{
    for (unsigned round = 0; round < 20000; round++) {
        unsigned seed = round;
        model *m = random_model(&seed);
        for (int i = 0; i < 6 && m->failures == 0; i++)
            random_step(m, &seed);
        m->fails_in = -1;
        zs_clear_error();
        if (m->failures == 0) CHECK(m->posts == m->sums);
        free_model(m);
    }
}

#define TEST(function) {#function, function}

static const struct {
    const char *name;
    void (*body)(void);
} tests[] = {
    TEST(where_shards_are_mapped),
    TEST(gathers_go_ahead),
    TEST(zero2_gathers_once),
    TEST(whole_units_share_at_once_in_order),
    TEST(gradients_that_stay_go_later),
    TEST(stepped_as_soon_as_it_is_summed),
    TEST(pinned_units_stay),
    TEST(a_forward_that_fails_closes_what_it_opened),
    TEST(a_backward_that_raises_is_settled_before_all_else),
    TEST(one_that_raises_late_has_missed_nothing),
    TEST(a_round_is_complete_no_more_if_packing_fails),
    TEST(a_unit_that_was_entered_elsewhere_may_leave),
    TEST(units_that_die_are_forgotten),
    TEST(random_passes_keep_the_rules),
};

int main(int argc, char **argv)
{
    for (size_t i = 0; argc == 2 && i < sizeof tests / sizeof tests[0]; i++) {
        if (strcmp(tests[i].name, argv[1]) != 0) continue;
        tests[i].body();
        printf("%s: ok\n", argv[1]);
        return 0;
    }
    fprintf(stderr, "usage: %s NAME, with a test's name\n", argv[0]);
    return 2;
}
