/* pass_dtype.c - see pass_dtype.h. */
#include "engine/pass_dtype.h"

static zs_status choose(zs_unit *unit, bool exact)
{
    zs_schedule *schedule = &unit->home->schedule;
    unit->pass_exact = exact;
    if (unit->exact == exact) return ZS_OK;
    ZS_TRY(zs_schedule_cancel(schedule, &unit->record)); /* begun in the other dtype */
    ZS_TRY(zs_schedule_reshard(schedule, &unit->record));
    zs_unit_set_exact(unit, exact);
    return ZS_OK;
}

static zs_status check_pinned(const zs_unit *unit, bool exact)
{
    if (!unit->record.pinned || unit->exact == exact) return ZS_OK;
    if (exact)
        return ZS_FAIL(ZS_ERR_STATE,
                       "unit '%s' was unsharded by unshard() in training mode, rounded by param_dtype or wire, and is "
                       "called in eval mode, in full precision (FSDP_USE_FULL_PREC_IN_EVAL=1); call reshard(), or "
                       "eval() before unshard()",
                       zs_unit_label(unit->name));
    return ZS_FAIL(
        ZS_ERR_STATE,
        "unit '%s' was called within summon_full_params() (or after unshard() in eval mode), where its parameters are "
        "exact, in their original dtype, not rounded by param_dtype or wire; call the model, and backward, outside "
        "summon_full_params() (or after reshard())",
        zs_unit_label(unit->name));
}

zs_status zs_pass_dtype_forward(zs_unit *unit, bool exact)
{
    if (!zs_unit_is_mixed(unit)) {
        unit->pass_exact = exact;
        if (unit->full_in_eval) zs_unit_set_exact(unit, exact); /* for its gradients alone */
        return ZS_OK;
    }
    ZS_TRY(check_pinned(unit, exact));
    if (unit->exact != exact && unit->record.inside > 0)
        return ZS_FAIL(ZS_ERR_STATE,
                       "unit '%s' was called in %s mode within its own forward in %s mode, which computes in another "
                       "precision (FSDP_USE_FULL_PREC_IN_EVAL=1); call train() and eval() outside the forward",
                       zs_unit_label(unit->name), exact ? "eval" : "training", exact ? "training" : "eval");
    return choose(unit, exact);
}

/* Would gradients of the parameters' own dtype be rounded to be sent? */
static bool rounds(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->trainable && flat->wire_size < flat->layout.itemsize) return true;
    }
    return false;
}

zs_status zs_pass_dtype_backward(zs_unit *unit, bool exact)
{
    if (exact && unit->full_in_eval && rounds(unit))
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "unit '%s': backward of a forward in eval mode would round gradients to reduce_dtype, which "
                       "FSDP_USE_FULL_PREC_IN_EVAL=1 rules out; call train() before that forward, or use "
                       "MixedPrecision(reduce_dtype=torch.float32)",
                       zs_unit_label(unit->name));
    if (!zs_unit_is_mixed(unit)) return ZS_OK;
    ZS_TRY(check_pinned(unit, exact));
    if (unit->used_in_backward && unit->exact != exact)
        return ZS_FAIL(
            ZS_ERR_STATE,
            "this backward needs unit '%s' in two precisions: for a forward in training mode (param_dtype, wire) and "
            "for "
            "one in eval mode (full precision, FSDP_USE_FULL_PREC_IN_EVAL=1), or train() or eval() was called "
            "before a checkpoint was recomputed; run both forwards in one mode, or call backward for each",
            zs_unit_label(unit->name));
    unit->used_in_backward = true;
    return choose(unit, exact);
}

void zs_pass_dtype_open_backward(zs_home *home)
{
    for (size_t i = 0; i < home->schedule.n; i++)
        zs_unit_of(home->schedule.records[i])->used_in_backward = false;
}
