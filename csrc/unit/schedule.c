/* schedule.c - see schedule.h. */
#include "unit/schedule.h"
#include "unit/engine.h"
#include "unit/history.h"
#include "unit/hold.h"
#include "unit/in_backward.h"
#include "unit/kept.h"
#include "unit/rounds.h"
#include "unit/sample.h"
#include "unit/session.h"
#include "unit/through.h"

#include <stdlib.h>
#include <string.h>

/* --- the engine ------------------------------------------------------------------------------------------------------------ */

zs_status zs_engine_new(const zs_ranks *ranks, const char *name, zs_engine **out)
{
    return zs_engine_make(ranks, name, zs_unit_hook_param, out);
}

zs_status zs_engine_adopt(zs_engine *engine, zs_unit *unit)
{
    zs_engine *old = unit->engine;
    if (old == engine) return ZS_OK;
    ZS_TRY(zs_engine_settle(old));
    if (old->phase != IDLE || engine->phase != IDLE)
        return ZS_FAIL(ZS_ERR_STATE,
                       "FSDP(...) was called during a forward or backward of unit '%s'; call it between steps",
                       zs_unit_label(unit->name));
    if (memcmp(&old->ranks, &engine->ranks, sizeof old->ranks) != 0)
        return ZS_FAIL(ZS_ERR_VALUE,
                       "unit '%s' uses another process group, transport or kind of strategy than the outer FSDP(...): "
                       "pass the same to all units; zero1, hybrid_full and an integer reshard_after_forward must be "
                       "used for all units or none",
                       zs_unit_label(unit->name));
    ZS_TRY(zs_engine_add(engine, unit));
    zs_rounds_forget(old->buckets, unit);
    zs_engine_forget(old, unit);
    old->lent_grads = true;
    unit->engine = zs_engine_retain(engine);
    zs_engine_release(old);
    return ZS_OK;
}

/* --- sessions ------------------------------------------------------------------------------------------------------------- */

static zs_status broadcast_buffers(zs_engine *engine)
{
    for (size_t i = 0; i < engine->n_buffers; i++) {
        if (!zs_tensor_alive(engine->buffers[i])) continue;
        zs_tensor_info info;
        void *data = NULL;
        ZS_TRY(zs_tensor_describe(engine->buffers[i], &info));
        if (info.numel == 0) continue;
        if (!info.contiguous)
            return ZS_FAIL(ZS_ERR_UNSUPPORTED, "forward_sync_buffers requires contiguous buffers: make them "
                                               "contiguous, or pass forward_sync_buffers=False");
        ZS_TRY(zs_tensor_data(engine->buffers[i], &data));
        size_t bytes = (size_t)info.numel * info.itemsize;
        zs_comm *all = engine->ranks.all;
        bool there = all->ops->broadcast_device != NULL && zs_same_where(info.where, all->device->where);
        ZS_TRY((there ? all->ops->broadcast_device : all->ops->broadcast)(all, data, bytes, 0));
    }
    return ZS_OK;
}

/* What is gathered for the secondary shards is gathered for this pass. */
static zs_status renew_kept(const zs_engine *engine, const zs_reading *reading)
{
    zs_comm *far = engine->ranks.far;
    if (far == NULL) return ZS_OK;
    far->reading = zs_reading_told(reading);
    return zs_kept_refresh(far, engine->units, engine->n);
}

/* What a session is opened for: a forward of a module in that mode, or none. */
typedef enum session_mode { IN_TRAINING, IN_EVALUATION, BY_HAND } session_mode;

static zs_status begin_session(zs_engine *engine, session_mode mode)
{
    ZS_TRY(zs_engine_settle(engine));
    zs_history_tell(engine);
    ZS_TRY(zs_engine_reserve(engine));
    engine->phase = FORWARD;
    engine->session = zs_next_node();
    zs_prefetch_begin(engine);
    engine->recording = zs_grad_mode();
    ZS_TRY(zs_session_reshard_all(engine, false)); /* left by a forward whose backward never came */
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_unit_write_back(engine->units[i]));
    for (size_t i = 0; i < engine->n; i++)
        ZS_TRY(zs_unit_cast(engine->units[i]));
    bool trains = mode != BY_HAND && engine->recording;
    zs_reading reading = {trains ? ZS_PASS_TRAIN : ZS_PASS_EVALUATE, mode == IN_EVALUATION, false, 0};
    reading.sample = zs_sample_take(engine, &reading.changed);
    ZS_TRY(renew_kept(engine, &reading));
    zs_session_discard_dead_grads(engine);
    ZS_TRY(broadcast_buffers(engine));
    return zs_session_begin_reading(engine, &reading);
}

static zs_status end_session(zs_engine *engine)
{
    if (engine->phase == FORWARD) engine->phase = IDLE;
    zs_prefetch_end(engine, ZS_PHASE_FORWARD);
    return zs_session_end_reading(engine, ZS_PHASE_FORWARD);
}

zs_status zs_engine_write_begin(zs_engine *engine)
{
    ZS_TRY(zs_engine_settle(engine)); /* peers may still read, for a backward that raised here */
    return zs_session_write_begin(engine);
}

void zs_engine_write_end(zs_engine *engine)
{
    zs_session_write_end(engine);
}

/* --- what is open ------------------------------------------------------------------------------------------------------ */

static zs_status make_room(zs_engine *engine)
{
    if (engine->n_open < engine->open_room) return ZS_OK;
    size_t room = 2 * engine->open_room + 8;
    zs_unit **grown = realloc(engine->open, room * sizeof *grown);
    if (grown == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory beginning a forward");
    engine->open = grown;
    engine->open_room = room;
    return ZS_OK;
}

/* Opens the session unless it is open, and notes for whom; if that fails, nothing is open that was not before. */
static zs_status enter(zs_engine *engine, zs_unit *unit, session_mode mode)
{
    ZS_TRY(make_room(engine));
    zs_status status = engine->n_open == 0 ? begin_session(engine, mode) : ZS_OK;
    if (status == ZS_OK)
        engine->open[engine->n_open++] = unit;
    else
        (void)end_session(engine); /* the first failure is the one that is reported */
    return status;
}

/* Where `unit` is open, innermost first; n_open: nowhere. */
static size_t find_open(const zs_engine *engine, const zs_unit *unit)
{
    for (size_t i = engine->n_open; i-- > 0;)
        if (engine->open[i] == unit) return i;
    return engine->n_open;
}

zs_status zs_engine_unwind(zs_engine *engine, size_t n_open)
{
    zs_status status = ZS_OK;
    while (engine->n_open > n_open) {
        zs_unit *unit = engine->open[--engine->n_open];
        if (unit != NULL && --unit->inside == 0 && !unit->held) ZS_ALSO(status, zs_unit_reshard(unit, ZS_SHARDED));
        if (engine->n_open == 0) ZS_ALSO(status, end_session(engine));
    }
    return status;
}

size_t zs_engine_n_open(const zs_engine *engine)
{
    return engine->n_open;
}

zs_status zs_engine_open(zs_engine *engine)
{
    if (engine->phase == BACKWARD && zs_in_backward())
        return ZS_FAIL(ZS_ERR_STATE,
                       "full parameters cannot be accessed during a backward; access them before or after it");
    return enter(engine, NULL, BY_HAND);
}

zs_status zs_engine_close(zs_engine *engine)
{
    size_t at = find_open(engine, NULL);
    return at < engine->n_open ? zs_engine_unwind(engine, at) : ZS_OK;
}

zs_status zs_engine_unshard(zs_unit *unit, bool exact)
{
    if (unit->fixed || unit->held) return ZS_OK;
    ZS_TRY(zs_engine_open(unit->engine));
    zs_status status = zs_hold(unit, exact);
    zs_status closed = zs_engine_close(unit->engine);
    return status != ZS_OK ? status : closed;
}

zs_status zs_engine_reshard(zs_unit *unit)
{
    bool running = unit->engine->phase == BACKWARD && zs_in_backward();
    if (unit->inside > 0 || running)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "reshard() of unit '%s' was called during %s, which needs the full parameters; call it afterwards",
            zs_unit_label(unit->name), running ? "a backward" : "its own forward");
    return zs_unit_reshard(unit, ZS_SHARDED);
}

/* --- forward ---------------------------------------------------------------------------------------------------------------- */

static bool recomputing(const zs_engine *engine)
{
    return engine->phase == BACKWARD && zs_in_backward();
}

/* A checkpoint around the whole model that runs its backward within another: each would end, and step, by itself. */
static zs_status check_outside(const zs_unit *unit)
{
    if (unit->stepping == NULL || !zs_in_backward()) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_UNSUPPORTED,
        "unit '%s' runs its forward inside another backward, most likely that of a reentrant checkpoint around the "
        "whole model, which optimizer_in_backward() does not support: pass use_reentrant=False to checkpoint()",
        zs_unit_label(unit->name));
}

zs_status zs_engine_pre_forward(zs_unit *unit, bool training)
{
    zs_engine *engine = unit->engine;
    zs_through_begin(unit);
    if (recomputing(engine)) {
        ZS_TRY(zs_in_backward_check(unit));
        return zs_session_make_whole(unit, ZS_PHASE_BACKWARD);
    }
    ZS_TRY(check_outside(unit));
    ZS_TRY(zs_hold_check_forward(unit));
    /* If this fails, the post-forward hook finds nothing to close. */
    ZS_TRY(enter(engine, unit, training ? IN_TRAINING : IN_EVALUATION));
    if (unit->inside++ == 0 && engine->recording) zs_in_backward_called(unit);
    if (engine->n_open == 1) engine->outermost_gathers = unit->n_params > 0;
    return zs_session_make_whole(unit, ZS_PHASE_FORWARD);
}

/* Whether a unit stays FULL from its forward to its backward. Mapped full buffers cost nothing to come back to; where a
 * gather costs, the outermost unit is wanted again at once, or if it has no parameters, the last of those within. */
static bool stays_full(const zs_unit *unit, bool keep)
{
    if (unit->held) return true;
    if (!keep) return false;
    if (unit->strategy == ZS_SHARD_GRAD_OP) return true;
    const zs_engine *engine = unit->engine;
    if (engine->ranks.near->ops->mapped) return false;
    return engine->n_open == 1 || (!engine->outermost_gathers && zs_prefetch_is_last(unit));
}

zs_status zs_engine_post_forward(zs_unit *unit, bool keep)
{
    zs_engine *engine = unit->engine;
    if (keep) zs_through_expect(unit);
    if (unit->inside == 0) return ZS_OK; /* recomputed in backward: stays FULL until its gradients are there */
    size_t at = find_open(engine, unit);
    zs_status status = zs_engine_unwind(engine, at + 1); /* what was within, and was left without a word */
    if (--unit->inside == 0 && !stays_full(unit, keep)) ZS_ALSO(status, zs_unit_reshard(unit, ZS_SHARDED));
    engine->n_open = at;
    if (at == 0) ZS_ALSO(status, end_session(engine));
    return status;
}
