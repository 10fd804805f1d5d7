/* test_schedule.c - the schedule alone: events in, actions out. See csrc/schedule/schedule.h.
 *
 * A pass is a line of text (schedule_player.h), and random passes, with failures in them, are judged by the
 * same rules. `test_schedule NAME` runs one test.
 */
#include "schedule_player.h"

/* --- passes ------------------------------------------------------------------------------------------------------- */

static void mapped_shards_are_not_gathered(void)
{
    model *m = new_model(true, "oss");
    says_of_forward(
        m, true,
        "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, reshard a, close");
    OK(backward(m));
    says(m,
         "ready back, open back, gather a, bind a, gather c, bind c, bucket, pack c, post c, gather b, bind b, bucket, "
         "pack b, post b, reshard a, reshard b, reshard c, sum c, sum b, close, end");
    free_model(m);
}

static void gathers_are_prefetched(void)
{
    model *m = new_model(false, "sss");
    set_ahead(m, 1, 1);
    says_of_forward(m, true,
                    "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, close");
    OK(backward(m));
    says_of_forward(m, true,
                    "ready, open, gather a, gather b, bind a, gather c, bind b, reshard b, bind c, reshard c, close");
    OK(backward(m));
    /* c is given out where b's backward begins; b where the backward ends, as it may be used in the root's forward. Of
     * a size there are two buckets, so c is summed before a packs. */
    says(m,
         "ready back, open back, gather c, gather b, bind c, pack c, reshard c, post c, bind b, pack b, sum c, pack a, "
         "post b, post a, reshard a, reshard b, sum b, sum a, close, end");
    free_model(m);
}

/* As in a model whose embedding is also its head: autograd reaches the root first, and again after all others. */
static zs_status backward_of_tied(model *m)
{
    unit *root = &m->units[0];
    ZS_TRY(zs_schedule_backward(&m->schedule, &root->record, root->stamp));
    for (int i = m->n - 1; i > 0; i--)
        ZS_TRY(back(m, i));
    ZS_TRY(zs_schedule_backward(&m->schedule, &root->record, root->stamp));
    ZS_TRY(zs_schedule_gradient(&m->schedule, &root->record, 0));
    return zs_schedule_end(&m->schedule);
}

static void no_prefetch_at_the_end_of_a_pass(void)
{
    model *m = new_model(false, "sssss");
    for (int step = 0; step < 4; step++) {
        OK(forward(m, true));
        m->log[0] = 0;
        OK(backward_of_tied(m));
        int gathers = 0;
        for (const char *at = m->log; (at = strstr(at, "gather e")) != NULL; at++)
            gathers++;
        CHECK(step == 0 || gathers == 1); /* the first backward cannot know where it ends */
    }
    free_model(m);
}

static void zero2_gathers_once(void)
{
    model *m = new_model(false, "zz");
    says_of_forward(m, true, "ready, open, gather a, bind a, gather b, bind b, close");
    /* The first one's backward never comes: the rest is resharded. */
    says_of_forward(
        m, false, "ready, reshard a, reshard b, open, gather a, gather b, bind a, bind b, reshard b, reshard a, close");
    free_model(m);
}

static void kept_units_are_not_gathered_again(void)
{
    model *m = new_model(false, "sss");
    set_ahead(m, 0, 0);
    OK(forward(m, true));
    zs_record_set_kept(&m->units[2].record, true); /* from the next forward on */
    OK(backward(m));
    says_of_forward(m, true, "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, close");
    OK(backward(m)); /* a is the outermost, and stays anyway */
    says(m,
         "ready back, open back, pack c, reshard c, post c, gather b, bind b, pack b, sum c, pack a, post b, post a, "
         "reshard a, reshard b, sum b, sum a, close, end");
    says_of_forward(
        m, false,
        "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, reshard a, close");
    zs_record_set_kept(&m->units[2].record, false);
    says_of_forward(m, true,
                    "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, close");
    free_model(m);
}

/* Units that stay have their own memory: their gathers go ahead of forwards farther than any others. */
static void kept_units_are_prefetched_far_ahead(void)
{
    model *m = new_model(false, "sssss");
    for (int i = 0; i < 4; i++)
        zs_record_set_kept(&m->units[i].record, true);
    OK(forward(m, true));
    OK(backward(m));
    says_of_forward(
        m, true,
        "ready, open, gather a, gather b, gather c, gather d, bind a, bind b, bind c, gather e, bind d, bind e, "
        "reshard e, close");
    OK(backward(m));
    set_ahead(m, 0, 0);
    says_of_forward(
        m, true,
        "ready, open, gather a, bind a, gather b, bind b, gather c, bind c, gather d, bind d, gather e, bind e, "
        "reshard e, close");
    free_model(m);
}

static void unsharded_units_reduce_in_order(void)
{
    model *m = new_model(false, "ww");
    OK(forward(m, true));
    OK(backward(m));
    says(m,
         "ready, open, close, ready back, open back, bucket, pack b, post b, share b, sum b, bucket, pack a, post a, "
         "share a, sum a, close, end");
    free_model(m);
}

static void unit_steps_once_its_gradients_are_summed(void)
{
    model *m = new_model(true, "osss");
    m->peers_are_slow = false;
    for (int i = 1; i < 4; i++)
        zs_record_set_early(&m->units[i].record, true);
    OK(forward(m, true));
    m->log[0] = 0;
    OK(backward(m));
    says(
        m,
        "ready back, open back, gather a, bind a, gather d, bind d, bucket, pack d, reshard d, post d, gather c, "
        "bind c, bucket, pack c, reshard c, post c, gather b, bind b, sum c, step c, sum d, step d, pack b, reshard b, "
        "post b, reshard a, sum b, step b, close, end");
    free_model(m);
}

static void pinned_units_stay_unsharded(void)
{
    model *m = new_model(true, "os");
    zs_entry by_hand = {.by_hand = true, .now = m->now};
    OK(zs_schedule_enter(&m->schedule, NULL, &by_hand));
    OK(zs_schedule_unshard(&m->schedule, &m->units[1].record));
    zs_schedule_pin(&m->units[1].record);
    OK(zs_schedule_leave_by_hand(&m->schedule));
    says(m, "ready, open, gather b, bind b, close");
    says_of_forward(m, false, "ready, open, gather a, bind a, reshard a, close");
    OK(zs_schedule_reshard(&m->schedule, &m->units[1].record));
    says(m, "reshard b");
    free_model(m);
}

/* --- reads -------------------------------------------------------------------------------------------------------- */

static zs_status read_unit(model *m, int i)
{
    zs_record_set_operation(&m->units[i].record, (uint64_t)m->now);
    return zs_schedule_read(&m->schedule, &m->units[i].record, m->now++);
}

static void read_unit_stays_until_its_reader_ends(void)
{
    model *m = new_model(false, "oss");
    m->units[1].held = true;
    OK(enter(m, 0));
    OK(enter(m, 1)); /* called, and read after that: the first pass does not know it yet */
    OK(leave(m, 1, true));
    OK(enter(m, 2));
    OK(leave(m, 2, true));
    OK(read_unit(m, 1));
    OK(leave(m, 0, false));
    /* The unit that followed b is gathered ahead, but not after a pass that has ended with b. */
    says(m,
         "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, reshard c, gather b, gather c, "
         "bind b, reshard a, cancel c, close");
    CHECK(m->units[1].record.read.reader == &m->units[0].record);
    OK(backward(m));
    m->log[0] = 0;
    OK(enter(m, 0));
    OK(enter(m, 1)); /* the next one does */
    OK(leave(m, 1, true));
    CHECK(m->units[1].record.state == ZS_FULL);
    OK(leave(m, 0, false));
    CHECK(m->units[1].record.read.reader == NULL && m->schedule.n_read == 0); /* it was not read this time */
    free_model(m);
}

static void unreferenced_read_is_dropped_at_the_next_one(void)
{
    model *m = new_model(true, "osss");
    m->units[2].held = true;
    OK(enter(m, 0));
    for (int i = 1; i < 4; i++)
        OK(read_unit(m, i));
    OK(leave(m, 0, false));
    says(m,
         "ready, open, gather a, bind a, gather b, bind b, reshard b, gather c, bind c, gather d, bind d, reshard c, "
         "reshard d, reshard a, close");
    free_model(m);
}

static void write_drops_reads_and_prefetches(void)
{
    model *m = new_model(false, "oss");
    set_ahead(m, 1, 1);
    for (int pass = 0; pass < 2; pass++) {
        m->log[0] = 0;
        OK(enter(m, 0));
        OK(read_unit(m, 1));
        OK(zs_schedule_unread(&m->schedule, &m->units[1].record));
        OK(zs_schedule_unread(&m->schedule, &m->units[2].record));
        OK(enter(m, 2));
        OK(leave(m, 2, false));
        OK(leave(m, 0, false));
    }
    says(m,
         "ready, open, gather a, bind a, gather b, gather c, bind b, reshard b, cancel c, gather c, bind c, reshard c, "
         "reshard a, close");
    free_model(m);
}

static void forward_continues_after_a_backward_within_it(void)
{
    model *m = new_model(true, "ss");
    OK(enter(m, 0));
    OK(enter(m, 1));
    OK(leave(m, 1, true));
    m->log[0] = 0;
    OK(back(m, 1));
    OK(zs_schedule_end(&m->schedule));
    CHECK(m->schedule.stage == ZS_IN_FORWARD && m->units[0].record.state == ZS_FULL);
    OK(leave(m, 0, false));
    CHECK(m->schedule.stage == ZS_IDLE && m->units[0].record.state == ZS_SHARDED && !m->session);
    free_model(m);
}

/* --- what fails --------------------------------------------------------------------------------------------------- */

static void failed_backward_is_settled_first(void)
{
    model *m = new_model(false, "oss");
    OK(forward(m, true));
    m->log[0] = 0;
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    OK(back(m, 2));
    zs_schedule_fail(&m->schedule);
    says(m, "ready back, open back, gather c, bind c, bucket, pack c, reshard a, reshard c");
    OK(forward(m, false));
    says(
        m,
        "give up, close, end, ready, open, gather a, bind a, gather b, gather c, bind b, reshard b, bind c, reshard c, "
        "reshard a, close");
    free_model(m);
}

static void late_failure_completes_the_backward(void)
{
    model *m = new_model(true, "os");
    OK(forward(m, true));
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    CHECK(!zs_schedule_all_arrived(&m->schedule));
    OK(back(m, 1));
    CHECK(zs_schedule_all_arrived(&m->schedule));
    OK(zs_schedule_end(&m->schedule));
    free_model(m);
}

/* A weight that is recomputed once more adds to a round that is complete; if that fails, the round is not. */
static void failed_packing_leaves_the_round_incomplete(void)
{
    model *m = new_model(false, "oss");
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

static void unit_entered_elsewhere_may_leave(void)
{
    model *m = new_model(true, "os"), *other = new_model(true, "o");
    zs_record *record = &m->units[1].record;
    OK(enter(m, 1));
    CHECK(zs_schedule_leave(&other->schedule, record, false) == ZS_OK);
    CHECK(record->inside == 0 && record->state == ZS_SHARDED && other->schedule.n_open == 0);
    OK(zs_schedule_unwind(&m->schedule, 0));
    free_model(other);
    free_model(m);
}

static void freed_units_are_forgotten(void)
{
    model *m = new_model(false, "oss");
    OK(forward(m, true));
    OK(enter(m, 0));
    OK(enter(m, 1));
    zs_record *gone = &m->units[1].record;
    zs_schedule_forget(&m->schedule, gone);
    CHECK(m->schedule.n == 2 && m->schedule.n_open == 2 && m->schedule.open[1] == NULL);
    CHECK(m->schedule.latest != gone);
    const zs_stops *stops = &m->units[0].record.stops[ZS_PHASE_FORWARD];
    for (size_t i = 0; i < stops->n; i++)
        CHECK(stops->list[i].before != gone && stops->list[i].next != gone);
    OK(leave(m, 0, false));
    CHECK(m->schedule.n_open == 0);
    zs_record_free(gone);
    m->units[1] = (unit){.model = m};
    zs_record_init(&m->units[1].record, outer);
    free_model(m);
}

/* --- buckets, and what peers wait for ----------------------------------------------------------------------------- */

static const char *const as_planned =
    "ready back, open back, gather a, bind a, gather d, bind d, pack d, post d, gather c, bind c, pack c, post c, "
    "gather b, "
    "bind b, sum d, pack b, post b, reshard a, reshard b, reshard c, reshard d, sum c, sum b, close, end";

/* A model whose buckets are those that a step needs, as the plan makes them. */
static model *planned_model(void)
{
    model *m = new_model(true, "osss");
    for (int i = 0; i < 2; i++) {
        m->log[0] = 0;
        OK(forward(m, true));
        m->log[0] = 0;
        OK(backward(m));
    }
    says(m, as_planned);
    return m;
}

static void bucket_of_ranks_that_differ_is_for_such_backwards_alone(void)
{
    model *m = planned_model();
    for (int i = 0; i < 3; i++) {
        m->yields = true;
        says_of_backward(
            m, i == 0 ? "ready back, open back, gather a, bind a, gather d, bind d, pack d, post d, gather c, "
                        "bind c, pack c, post c, gather b, bind b, bucket, pack b, post b, reshard a, reshard b, "
                        "reshard c, reshard d, sum d, sum c, sum b, close, end"
                      : "ready back, open back, gather a, bind a, gather d, bind d, pack d, post d, gather c, "
                        "bind c, pack c, post c, gather b, bind b, pack b, post b, reshard a, reshard b, "
                        "reshard c, reshard d, sum d, sum c, sum b, close, end");
        m->yields = false;
        says_of_backward(m, as_planned);
    }
    free_model(m);
}

/* A unit's gradients, when its peers have done so much of the rounds of d and c; the bucket is that of unit `freed`. */
static void says_with_peers(model *m, peers of_d, peers of_c, const char *expected, int freed)
{
    OK(forward(m, true));
    OK(zs_schedule_backward(&m->schedule, &m->units[0].record, m->units[0].stamp));
    OK(back(m, 3));
    OK(back(m, 2));
    m->units[3].peers = of_d;
    m->units[2].peers = of_c;
    m->log[0] = 0;
    OK(back(m, 1));
    says(m, expected);
    for (int i = 2; i < 4; i++)
        CHECK((m->units[i].record.round.out == NULL) == (i == freed));
    OK(zs_schedule_end(&m->schedule));
}

static void bucket_that_peers_have_read_is_taken_if_they_differ_in_order(void)
{
    model *m = planned_model();
    says_with_peers(m, NOTHING, NOTHING, "gather b, bind b, sum d, pack b, post b", 3);
    says_with_peers(m, NOTHING, POSTED, "gather b, bind b, sum c, sum d, pack b, post b", 3);
    says_with_peers(m, NOTHING, READ, "gather b, bind b, sum c, pack b, post b", 2);
    says_with_peers(m, POSTED, READ, "gather b, bind b, sum c, sum d, pack b, post b", 3);
    says_with_peers(m, READ, READ, "gather b, bind b, sum c, sum d, pack b, post b", 3);
    free_model(m);
}

/* --- random passes ------------------------------------------------------------------------------------------------ */

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
    model *m = new_model_of(draw(seed, 2), n, traits);
    set_ahead(m, (int)draw(seed, 3), (int)draw(seed, 3));
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

static const one_test tests[] = {
    TEST(mapped_shards_are_not_gathered),
    TEST(gathers_are_prefetched),
    TEST(no_prefetch_at_the_end_of_a_pass),
    TEST(zero2_gathers_once),
    TEST(kept_units_are_not_gathered_again),
    TEST(kept_units_are_prefetched_far_ahead),
    TEST(unsharded_units_reduce_in_order),
    TEST(unit_steps_once_its_gradients_are_summed),
    TEST(pinned_units_stay_unsharded),
    TEST(read_unit_stays_until_its_reader_ends),
    TEST(unreferenced_read_is_dropped_at_the_next_one),
    TEST(write_drops_reads_and_prefetches),
    TEST(forward_continues_after_a_backward_within_it),
    TEST(failed_backward_is_settled_first),
    TEST(late_failure_completes_the_backward),
    TEST(failed_packing_leaves_the_round_incomplete),
    TEST(unit_entered_elsewhere_may_leave),
    TEST(freed_units_are_forgotten),
    TEST(bucket_of_ranks_that_differ_is_for_such_backwards_alone),
    TEST(bucket_that_peers_have_read_is_taken_if_they_differ_in_order),
    TEST(random_passes_keep_the_rules),
};

int main(int argc, char **argv)
{
    return run_one_test(tests, COUNT(tests), argc, argv);
}
