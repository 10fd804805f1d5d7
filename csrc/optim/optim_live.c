/* optim_live.c - steps that a CUDA graph can repeat: see optim.h's zs_live.
 *
 * Nothing that changes from step to step may pass through the host. Counters, learning rate and found_inf are read in
 * place. The host only needs to know which members have the same constants; that follows from which were stepped
 * together (counters.c).
 */
#include "optim/optim_plan.h"

#include <stdlib.h>

/* Is any of this step's devices captured now? */
static zs_status find_capture(const zs_optim *plan, bool *out)
{
    const zs_device *seen = NULL;
    *out = false;
    for (int64_t i = 0; i < plan->n_members && !*out; i++) {
        const zs_view *found = &plan->views[i];
        if (found->verdict != ZS_MEMBER_TAKEN || found->run.device == seen) continue;
        seen = found->run.device;
        ZS_TRY(zs_device_capturing(seen, out));
    }
    return ZS_OK;
}

/* A momentum's first step sets it to the gradient, which a graph would do again and again. */
static zs_status refuse_first(const zs_optim *plan)
{
    bool captured = false, first = false;
    for (int64_t i = 0; i < plan->n_members; i++)
        first = first || (plan->views[i].verdict == ZS_MEMBER_TAKEN && plan->members[i].first);
    if (first && plan->full && plan->rule == ZS_RULE_SGD) ZS_TRY(find_capture(plan, &captured));
    if (!captured) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE, "the first step of an optimizer with momentum initializes its state and cannot be "
                                 "captured in a CUDA graph: run a step or two before the capture");
}

zs_status zs_live_refuse_capture(const zs_optim *plan)
{
    bool captured = false;
    ZS_TRY(refuse_first(plan));
    if (plan->rule != ZS_RULE_ADAM && !plan->dithered && !plan->compact)
        return ZS_OK; /* plain SGD: nothing in it has a number */
    ZS_TRY(find_capture(plan, &captured));
    if (!captured) return ZS_OK;
    return ZS_FAIL(ZS_ERR_STATE,
                   "this optimizer step depends on its step count, which a CUDA graph would replay unchanged: create "
                   "the optimizer with capturable=True%s",
                   plan->compact    ? ", one with 32-bit state"
                   : plan->dithered ? " and without stochastic_rounding"
                                    : "");
}

/* Counters of another dtype are no kin. */
static zs_status make_shared_counts(zs_optim *plan)
{
    double *key = calloc((size_t)plan->n_members + 1, sizeof *key);
    if (key == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an optimizer plan");
    for (int64_t i = 0; i < plan->n_members; i++)
        key[i] = plan->members[i].step_wide ? -1 - plan->members[i].steps : plan->members[i].steps;
    zs_status status = zs_counters_new(plan->n_members, key, &plan->shared_counts);
    free(key);
    return status;
}

zs_status zs_live_check(zs_optim *plan)
{
    plan->live_device = NULL;
    for (int64_t i = 0; i <= plan->n_members; i++)
        plan->slots[i] = -1;
    for (int64_t i = 0; i < plan->n_members; i++) {
        const zs_view *found = &plan->views[i];
        plan->taken[i] = found->verdict == ZS_MEMBER_TAKEN;
        bool here = plan->taken[i] && found->run.device->ops->queues;
        if (here && plan->live_device == NULL) plan->live_device = found->run.device;
        bool stays = found->verdict == ZS_MEMBER_IDLE || found->verdict == ZS_MEMBER_STATELESS;
        if (stays || (here && found->run.device == plan->live_device)) continue;
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "capturable=True requires contiguous parameters on one GPU, with dense gradients and state of "
                       "the same dtype and device; parameter %lld of a group (%lld elements) does not qualify: move it "
                       "to a param group with capturable=False",
                       (long long)i, (long long)found->run.numel);
    }
    if (plan->shared_counts == NULL) ZS_TRY(make_shared_counts(plan));
    zs_counters_part(plan->shared_counts, plan->taken);
    return refuse_first(plan);
}

const zs_constants *zs_live_constants(zs_optim *plan, int64_t member)
{
    bool first = plan->members[member].first;
    int64_t *slot = &plan->slots[plan->rule == ZS_RULE_ADAM ? zs_counters_of(plan->shared_counts, member) : first];
    if (*slot < 0) {
        *slot = plan->n_constants++;
        plan->constants[*slot] = (zs_constants){.first = first, .live = plan->live->room + *slot * ZS_CONSTANTS_BYTES};
    }
    return &plan->constants[*slot];
}

zs_status zs_live_queue_constants(const zs_optim *plan)
{
    for (int64_t c = 0; c < plan->n_constants; c++) {
        const zs_constants *constants = &plan->constants[c];
        zs_constants_job job = {
            .rule = plan->rule, .first = constants->first, .hyper = &plan->hyper, .live = plan->live};
        job.out = constants->live;
        job.steps = plan->counters;
        for (int64_t i = 0; i < plan->n_members && plan->rule == ZS_RULE_ADAM; i++) {
            const zs_view *found = &plan->views[i];
            if (!plan->taken[i] || found->run.constants != constants) continue;
            job.step_dtype = found->step_dtype;
            plan->counters[job.n_steps++] = found->step_data;
        }
        ZS_TRY(plan->live_device->ops->constants(plan->live_device, &job));
    }
    return ZS_OK;
}
