/* pin.c - units unsharded by hand: from unshard() to reshard(), or within summon_full_params().
 *
 * User code may take any time between the two, so it gets a copy, not a view of shards that their owners may write to
 * next. No session stays open, and no peer waits. Writes to the copy can be kept at the end: each rank takes its shard
 * of them. See engine.h. */

#include "engine/engine.h"

/* Chooses the full buffer's dtype: the parameters' own, or the compute dtype. */
static zs_status choose_dtype(zs_unit *unit, bool exact)
{
    bool lowered = zs_unit_is_mixed(unit);
    if (zs_unit_is_full(unit)) {
        if (!exact || !lowered || unit->exact) return ZS_OK;
        return ZS_FAIL(
            ZS_ERR_STATE,
            "unit '%s' is unsharded as its forward computes with it (rounded by param_dtype or wire), by its "
            "forward or by unshard(), so its full parameters cannot be read in their original dtype and exact; read "
            "them "
            "outside the unit's forward, or after reshard()",
            zs_unit_label(unit->name));
    }
    if (unit->exact == exact) return ZS_OK;
    ZS_TRY(zs_schedule_cancel(&unit->context->schedule, &unit->record)); /* begun in the other dtype */
    zs_unit_set_exact(unit, exact);
    return ZS_OK;
}

zs_status zs_engine_summon(zs_unit *unit, bool exact)
{
    ZS_TRY(choose_dtype(unit, exact));
    zs_status status = zs_schedule_unshard(&unit->context->schedule, &unit->record);
    if (status != ZS_OK) zs_unit_set_exact(unit, false);
    return status;
}

zs_status zs_engine_dismiss(zs_unit *unit)
{
    return zs_schedule_reshard(&unit->context->schedule, &unit->record);
}

zs_status zs_pin(zs_unit *unit, bool exact)
{
    if (unit->record.pinned) return choose_dtype(unit, exact); /* is it of the requested dtype? */
    ZS_TRY(zs_engine_summon(unit, exact));
    zs_schedule_pin(&unit->record);
    zs_pinned_begin();
    zs_status status = zs_unit_copy_full(unit);
    if (status != ZS_OK) (void)zs_engine_dismiss(unit);
    unit->context->calls->note_peak(unit->context);
    return status;
}

zs_status zs_pin_check(const zs_unit *unit)
{
    if (!unit->record.pinned || !unit->exact || !zs_unit_is_mixed(unit)) return ZS_OK;
    return ZS_FAIL(
        ZS_ERR_STATE,
        "unit '%s' was called within summon_full_params(), where its parameters are exact, in their original "
        "dtype, not rounded by param_dtype or wire; call the model, and backward, outside "
        "summon_full_params()",
        zs_unit_label(unit->name));
}
