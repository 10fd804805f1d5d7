/* in_backward.c - see in_backward.h. */
#include "reduce/in_backward.h"

#include "pager/pager.h"
#include "reduce/grad_memory.h"
#include "unit/context.h"

#include <stdlib.h>
#include <string.h>

struct zs_in_backward_state {
    zs_stepper stepper;
    bool *stepped;             /* [n_params] which parameters it updates; in this struct's memory */
    zs_mem *own[ZS_MAX_FLATS]; /* the gradients' memory, unused meanwhile; owned references */
    bool lends;                /* in a backward: disk memory is lent to its steps (pager.h) */
    bool *arrived;             /* [n_params] (alone) gradients that have arrived in this backward; as `stepped` */
};

static const char GIVEN_BACK[] = "this gradient was freed: optimizer_in_backward() stepped with it and released its "
                                 "memory; clone it in a hook to keep it";

bool zs_in_backward_alone(const zs_unit *unit)
{
    return unit->stepping != NULL && unit->record.is.fixed && unit->context->ranks.all->world == 1;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Is any parameter's .grad its view of the grad shard? One that the stepper does not know may be. */
static bool grads_shown(const zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (param->grad == NULL || !zs_tensor_alive(param->tensor)) continue;
        bool shown = false;
        if (zs_grad_is(param->tensor, param->grad, &shown) != ZS_OK || shown) return true;
    }
    return false;
}

static void give_back(zs_unit *unit)
{
    if (unit->borrows && !grads_shown(unit)) zs_grad_memory_clear(unit, GIVEN_BACK);
}

/* --- attaching ---------------------------------------------------------------------------------------------------- */

static zs_status check_idle(const zs_unit *unit, const bool *stepped)
{
    if (unit->stepping != NULL)
        return ZS_FAIL(ZS_ERR_STATE,
                       "unit '%s' is already stepped in backward: pass all optimizers to one call of "
                       "optimizer_in_backward(), or remove() the earlier handle first",
                       zs_unit_label(unit->name));
    if (zs_in_backward())
        return ZS_FAIL(ZS_ERR_STATE, "optimizer_in_backward() cannot be called during a backward; call it before");
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_grad_info grad = {0};
        if (!stepped[i] || !zs_tensor_alive(unit->params[i].tensor)) continue;
        ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
        if (grad.defined)
            return ZS_FAIL(ZS_ERR_STATE,
                           "parameter '%s' already has a .grad, which backward would accumulate into and step with: "
                           "call optimizer.step() and zero_grad() before optimizer_in_backward()",
                           unit->params[i].name);
    }
    return ZS_OK;
}

static bool steps_all(const zs_unit *unit, const bool *stepped)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        bool wanted = param->grad != NULL && zs_tensor_alive(param->tensor) && zs_tensor_requires_grad(param->tensor);
        if (wanted && !stepped[i]) return false;
    }
    return true;
}

zs_status zs_in_backward_attach(zs_unit *unit, const zs_stepper *stepper, const bool *stepped)
{
    size_t n = (size_t)unit->n_params;
    zs_in_backward_state *made = NULL;
    zs_status status = check_idle(unit, stepped);
    if (status == ZS_OK && (made = calloc(1, sizeof *made + 2 * n * sizeof *stepped)) == NULL)
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating unit '%s'", zs_unit_label(unit->name));
    if (status != ZS_OK) {
        stepper->release(stepper->ctx);
        return status;
    }
    made->stepper = *stepper;
    made->stepped = (bool *)(made + 1);
    made->arrived = made->stepped + n;
    for (size_t i = 0; i < n; i++)
        made->stepped[i] = stepped[i];
    unit->context->calls->note_peak(unit->context);
    zs_context_replan(unit->context);
    unit->stepping = made;
    zs_record_set_early(&unit->record, true);
    zs_grad_memory_drop(unit);
    unit->borrows = unit->cunit != NULL && steps_all(unit, stepped);
    if (unit->borrows) zs_grad_memory_set_aside(unit, made->own, GIVEN_BACK);
    for (int64_t i = 0; i < unit->n_params && status == ZS_OK && zs_in_backward_alone(unit); i++)
        if (zs_tensor_alive(unit->params[i].tensor)) status = unit->context->calls->hook_param(unit, i);
    if (status != ZS_OK) zs_in_backward_detach(unit);
    return status;
}

void zs_in_backward_detach(zs_unit *unit)
{
    zs_in_backward_state *stepping = unit->stepping;
    if (stepping == NULL) return;
    give_back(unit);
    zs_grad_memory_put_back(unit, stepping->own);
    zs_context_replan(unit->context);
    for (int64_t i = 0; i < unit->n_params && zs_in_backward_alone(unit); i++)
        if (zs_tensor_alive(unit->params[i].tensor)) (void)zs_hook_grad_remove(unit->params[i].tensor);
    unit->stepping = NULL;
    zs_record_set_early(&unit->record, false);
    unit->borrows = false;
    stepping->stepper.release(stepping->stepper.ctx);
    free(stepping);
}

/* --- when a unit is over ------------------------------------------------------------------------------------------ */

zs_status zs_in_backward_begin(const zs_unit *unit)
{
    if (unit->stepping == NULL || unit->stepping->stepper.begin == NULL) return ZS_OK;
    return unit->stepping->stepper.begin(unit->stepping->stepper.ctx);
}

void zs_in_backward_open(zs_unit *unit)
{
    if (unit->stepping == NULL || unit->stepping->lends || !zs_pager_active()) return;
    unit->stepping->lends = true;
    zs_pager_open();
}

/* Call it before anything else uses the unit's parameters. */
static zs_status close_lending(zs_unit *unit)
{
    if (!unit->stepping->lends) return ZS_OK;
    unit->stepping->lends = false;
    return zs_pager_close();
}

zs_status zs_in_backward_check(const zs_unit *unit)
{
    if (!unit->record.early.over) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "backward needs the parameters of unit '%s' again after optimizer_in_backward() stepped them: they "
                   "were used outside the unit's forward, or their part of the graph is recomputed more than once; "
                   "remove() the handle and call optimizer.step() after backward",
                   zs_unit_label(unit->name));
}

/* --- stepping ----------------------------------------------------------------------------------------------------- */

static bool is_stepped(const zs_unit *unit, int64_t i)
{
    return unit->stepping->stepped[i] && zs_tensor_alive(unit->params[i].tensor);
}

zs_status zs_in_backward_step(zs_unit *unit)
{
    bool any = false;
    for (int64_t i = 0; i < unit->n_params && !any; i++) {
        zs_grad_info grad = {0};
        if (is_stepped(unit, i)) ZS_TRY(zs_grad_describe(unit->params[i].tensor, &grad));
        any = grad.defined;
    }
    zs_pager_nest(unit->stepping->lends);
    if (any) unit->context->calls->show(unit->context);
    unit->context->stepping = true;
    zs_status status = any ? unit->stepping->stepper.step(unit->stepping->stepper.ctx) : ZS_OK;
    unit->context->stepping = false;
    zs_pager_nest(false);
    ZS_TRY(status);
    for (int64_t i = 0; i < unit->n_params && any; i++)
        if (is_stepped(unit, i)) ZS_TRY(zs_grad_set(unit->params[i].tensor, NULL));
    give_back(unit);
    return ZS_OK;
}

static bool all_arrived(const zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_tensor *tensor = unit->params[i].tensor;
        if (unit->stepping->arrived[i] || !zs_tensor_alive(tensor)) continue;
        if (zs_tensor_requires_grad(tensor)) return false;
    }
    return true;
}

zs_status zs_in_backward_arrived(zs_unit *unit, int64_t i, bool *all)
{
    if (zs_hook_has_users(unit->params[i].tensor)) ZS_TRY(zs_hook_run_users(unit->params[i].tensor));
    unit->stepping->arrived[i] = true;
    *all = all_arrived(unit);
    return ZS_OK;
}

zs_status zs_in_backward_finish(zs_unit *unit, bool good)
{
    zs_in_backward_state *stepping = unit->stepping;
    if (stepping == NULL) return ZS_OK;
    zs_status status = good && unit->record.round.syncs ? zs_in_backward_step(unit) : ZS_OK;
    zs_status written = close_lending(unit);
    ZS_ALSO(status, written);
    if (good && status == ZS_OK && stepping->stepper.over != NULL)
        status = stepping->stepper.over(stepping->stepper.ctx);
    zs_in_backward_abandon(unit);
    return status;
}

void zs_in_backward_abandon(zs_unit *unit)
{
    if (unit->stepping == NULL) return;
    (void)close_lending(unit); /* what failed now fails again with the next read */
    memset(unit->stepping->arrived, 0, (size_t)unit->n_params * sizeof *unit->stepping->arrived);
}
