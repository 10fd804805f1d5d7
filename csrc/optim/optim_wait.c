/* optim_wait.c - a step that is prepared now and done later, by kept_step.h. See optim.h. */
#include "optim/optim_plan.h"

#include <stdlib.h>
#include <string.h>

#include "pager/pager.h"

zs_status zs_optim_job(const zs_optim *plan, zs_update_job *out)
{
    if (plan->live != NULL || plan->n_queued > 0)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "a step that outlives its process needs parameters on the CPU, not on a GPU");
    if (zs_pager_active())
        return ZS_FAIL(ZS_ERR_UNSUPPORTED, "a step that outlives its process cannot be offloaded: leave offload out");
    *out = (zs_update_job){plan->rule, plan->full, plan->runs, NULL, plan->n_runs};
    return ZS_OK;
}

/* Is the gradient where it was, with the values that it had? */
static bool is_same(const zs_view *before, const zs_view *now)
{
    if (before->verdict != now->verdict) return false;
    return now->verdict != ZS_MEMBER_TAKEN ||
           (before->run.grad == now->run.grad && before->grad_version == now->grad_version);
}

zs_status zs_optim_look_again(zs_optim *plan)
{
    size_t n = (size_t)plan->n_members;
    zs_view *before = malloc((n + 1) * sizeof *before);
    if (before == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory checking %zu gradients", n);
    memcpy(before, plan->views, n * sizeof *before);
    const zs_hyper hyper = plan->hyper;
    zs_status status = zs_optim_prepare(plan, &hyper, NULL);
    for (size_t i = 0; i < n && status == ZS_OK; i++)
        if (!is_same(&before[i], &plan->views[i]))
            status = ZS_FAIL(ZS_ERR_STATE,
                             "gradients changed between the optimizer's step() and the end of commit(), which needs "
                             "them: call zero_grad() after the block");
    free(before);
    return status;
}
