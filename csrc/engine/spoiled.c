/* spoiled.c - gradients that a failed backward added to others: they must not be used. See engine_inside.h. */

#include "engine/engine_inside.h"
#include "reduce/grads.h"

#include <math.h>

/* Is a parameter's .grad the result of a failed backward? Zeros are not. */
static zs_status is_spoiled(const zs_unit *unit, const zs_param *param, bool *spoiled)
{
    *spoiled = false;
    if (param->grad == NULL || !zs_tensor_alive(param->tensor)) return ZS_OK;
    ZS_TRY(zs_grad_is(param->tensor, param->grad, spoiled));
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(param->tensor, &grad));
    *spoiled |= unit->mixed && grad.defined;
    if (!*spoiled || !grad.dense) return ZS_OK;
    zs_numbers numbers = {grad.data, grad.numel, grad.dtype};
    double largest = 0;
    ZS_TRY(zs_device_norm(zs_context_device(unit->context), &numbers, 1, (double)INFINITY, &largest));
    *spoiled = largest != 0;
    return ZS_OK;
}

void zs_engine_undo_grads(zs_unit *unit)
{
    unit->mixed |= unit->record.is.replicated && unit->record.round.posted;
    if (zs_grads_undo(unit) || unit->mixed) zs_engine_of_schedule(&unit->context->schedule)->spoiled = true;
}

zs_status zs_engine_check_spoiled(zs_engine *engine)
{
    for (size_t i = 0; i < zs_engine_n_units(engine) && engine->spoiled; i++) {
        zs_unit *unit = zs_engine_unit(engine, i);
        for (int64_t p = 0; p < unit->n_params; p++) {
            bool spoiled = false;
            ZS_TRY(is_spoiled(unit, &unit->params[p], &spoiled));
            if (spoiled)
                return ZS_FAIL(ZS_ERR_STATE,
                               "the .grad of parameter '%s' has a part of the gradients of a backward that failed: "
                               "call zero_grad() on all ranks before the next backward or optimizer step",
                               unit->params[p].name);
        }
        unit->mixed = false;
    }
    engine->spoiled = false;
    return ZS_OK;
}
