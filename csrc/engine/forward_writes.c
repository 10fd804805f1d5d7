/* forward_writes.c - scripts that write to a unit's shards within a forward, as MoCo's momentum update and SwAV's
 * normalized prototypes do.
 *
 * Peers may read this rank's shards in place. Two barriers separate reads of the old values from reads of the new ones:
 * one before the first write, and one before the unit is gathered again or the forward ends. Where no peer maps the
 * shards, the gathers themselves keep the order. See engine.h. */
#include "engine/engine.h"

#include "engine/engine_inside.h"
#include "engine/recording.h"
#include "unit/unit.h"

/* A barrier: all ranks have run the code before it, and none after it. */
static zs_status meet(const zs_unit *unit)
{
    zs_comm *shard_group = unit->context->ranks.shard_group;
    if (!zs_comm_shares_memory(shard_group)) return ZS_OK;
    bool named = zs_call_begin("forward()");
    char none = 0;
    zs_status status = zs_comm_exchange(shard_group, &none, 0, &none);
    if (named) zs_call_end();
    return status;
}

static zs_status check(const zs_unit *unit)
{
    if (zs_comm_shares_memory(unit->context->ranks.shard_group) && !unit->context->schedule.entry.recording)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "parameters of unit '%s' are written to in a forward without gradients, which one rank may run alone; "
            "write to them before the forward, or run it with gradients enabled",
            zs_unit_label(unit->name));
    return ZS_OK;
}

zs_status zs_forward_write_begin(zs_unit *unit)
{
    zs_schedule *schedule = &unit->context->schedule;
    if (schedule->n_open == 0 || !zs_engine_in_forward(zs_engine_of(unit))) return ZS_OK;
    if (zs_backward_runs(schedule)) return ZS_OK;
    ZS_TRY(zs_context_follow(unit->context));
    ZS_TRY(zs_schedule_unread(schedule, &unit->record));
    if (unit->record.is.replicated || unit->written_in_forward) return ZS_OK;
    ZS_TRY(check(unit));
    ZS_TRY(meet(unit));
    unit->written_in_forward = true;
    return ZS_OK;
}

zs_status zs_forward_write_settle(zs_unit *unit)
{
    if (!unit->written_in_forward) return ZS_OK;
    unit->written_in_forward = false;
    zs_comm *replica_group = unit->context->ranks.replica_group;
    zs_record *record = &unit->record;
    zs_status status = zs_unit_write_back(unit);
    ZS_THEN(status, zs_unit_cast(unit));
    if (replica_group != NULL) {
        replica_group->model = (zs_model){0}; /* all ranks gather these, or none */
        ZS_THEN(status, zs_secondary_refresh(replica_group, &record, 1));
    }
    ZS_ALSO(status, meet(unit)); /* peers wait for it */
    return status;
}

zs_status zs_forward_writes_end(zs_engine *engine)
{
    zs_status status = ZS_OK;
    for (size_t i = 0; i < zs_engine_n_units(engine); i++)
        ZS_ALSO(status, zs_forward_write_settle(zs_engine_unit(engine, i)));
    return status;
}
