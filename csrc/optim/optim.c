/* optim.c - the plan: where everything lies at this step, joined into runs. See optim.h. */
#include "optim/optim_plan.h"

#include <assert.h>
#include <stdlib.h>

#include "device/device.h"
#include "device/device_cuda.h"
#include "device/pending.h"
#include "pager/pager.h"
#include "update/codes.h"

/* --- life --------------------------------------------------------------------------------------------------------- */

zs_status zs_optim_new(zs_rule rule, bool compact, int64_t capacity, zs_optim **out)
{
    size_t n = capacity > 0 ? (size_t)capacity : 1;
    zs_optim *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an optimizer plan");
    plan->rule = rule;
    plan->compact = compact;
    plan->capacity = capacity;
    plan->members = calloc(n, sizeof *plan->members);
    plan->views = calloc(n, sizeof *plan->views);
    plan->runs = calloc(2 * n, sizeof *plan->runs);
    plan->queued = plan->runs + n;
    plan->ends = calloc(n, sizeof *plan->ends);
    plan->constants = calloc(n, sizeof *plan->constants);
    plan->taken = calloc(n, sizeof *plan->taken);
    plan->counters = calloc(n, sizeof *plan->counters);
    plan->slots = calloc(n + 1, sizeof *plan->slots);
    bool room = plan->taken && plan->counters && plan->slots;
    if (!room || !plan->members || !plan->views || !plan->runs || !plan->ends || !plan->constants) {
        zs_optim_free(plan);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating an optimizer plan of %zu parameters", n);
    }
    *out = plan;
    return ZS_OK;
}

void zs_optim_free(zs_optim *plan)
{
    if (plan == NULL) return;
    for (int64_t i = 0; i < plan->n_members; i++) {
        zs_tensor_free(plan->members[i].param);
        zs_tensor_free(plan->members[i].step);
        for (int s = 0; s < ZS_OPTIM_STATES; s++)
            zs_tensor_free(plan->members[i].state[s]);
    }
    free(plan->members);
    free(plan->views);
    free(plan->runs);
    free(plan->ends);
    free(plan->constants);
    free(plan->taken);
    free(plan->counters);
    free(plan->slots);
    zs_counters_free(plan->shared_counts);
    free(plan);
}

void zs_optim_add(zs_optim *plan, const zs_member *member)
{
    assert(plan->n_members < plan->capacity);
    zs_member *added = &plan->members[plan->n_members++];
    *added = *member;
    zs_tensor_info info;
    bool known = added->param != NULL && zs_tensor_describe(added->param, &info) == ZS_OK;
    added->numel = known ? info.numel : -1;
    added->step_wide = added->step != NULL && zs_tensor_describe(added->step, &info) == ZS_OK && info.dtype == ZS_F64;
}

zs_verdict zs_optim_verdict(const zs_optim *plan, int64_t index)
{
    return plan->views[index].verdict;
}

/* --- looking ------------------------------------------------------------------------------------------------------ */

/* Does the rule keep moment `state`? */
static bool keeps(const zs_optim *plan, int state)
{
    switch (state) {
    case ZS_STATE_FIRST: return plan->rule == ZS_RULE_ADAM || plan->full;
    case ZS_STATE_SECOND: return plan->rule == ZS_RULE_ADAM;
    case ZS_STATE_MAX: return plan->rule == ZS_RULE_ADAM && plan->full;
    default: return false;
    }
}

/* Moments in 8 bits have separate exponents. */
static zs_form form_of(const zs_optim *plan, const zs_member *member)
{
    if (!plan->compact) return ZS_FORM_PLAIN;
    return member->state[ZS_STATE_FIRST_SCALE] != NULL ? ZS_FORM_CODED : ZS_FORM_WIDE;
}

/* Does the step read and write this state tensor of a member? */
static bool uses(const zs_optim *plan, const zs_member *member, int state)
{
    if (state < ZS_STATE_FIRST_SCALE) return keeps(plan, state);
    if (state == ZS_STATE_LOW) return plan->compact && member->state[state] != NULL;
    return form_of(plan, member) == ZS_FORM_CODED && keeps(plan, state - ZS_STATE_FIRST_SCALE);
}

/* Plain memory that a loop can run over. */
typedef struct plain_memory {
    zs_dtype dtype;
    int64_t numel;
    void *data;
} plain_memory;

/* Is this such memory, of `where`? Also returns which. */
static zs_status find_described(const zs_tensor *tensor, const zs_tensor_info *info, zs_where where, plain_memory *out,
                                bool *plain)
{
    *plain = zs_same_where(info->where, where) && info->contiguous && info->dtype != ZS_BYTES;
    *out = (plain_memory){info->dtype, info->numel, NULL};
    if (!*plain || info->numel == 0) return ZS_OK; /* an empty shard has no bytes to find */
    return zs_tensor_data(tensor, &out->data);
}

static zs_status find_memory(const zs_tensor *tensor, zs_where where, plain_memory *out, bool *plain)
{
    zs_tensor_info info;
    ZS_TRY(zs_tensor_describe(tensor, &info));
    return find_described(tensor, &info, where, out, plain);
}

zs_status zs_optim_device_of(const zs_tensor *tensor, const zs_tensor_info *info, const zs_device **out)
{
    const zs_mem *mem = info->strided ? zs_tensor_mem(tensor) : NULL;
    *out = info->where.type == ZS_ON_CPU ? zs_device_cpu() : NULL;
    if (mem != NULL) *out = zs_device_of(mem);
    if (*out == NULL && info->where.type == ZS_ON_CUDA) return zs_device_cuda(info->where.index, false, out);
    return ZS_OK;
}

static bool has_state(const zs_optim *plan, const zs_member *member)
{
    for (int s = 0; s < ZS_OPTIM_STATES; s++) {
        if (uses(plan, member, s) && member->state[s] == NULL) return false;
    }
    return plan->rule != ZS_RULE_ADAM || member->step != NULL;
}

/* Finds the number of this step, or (capturable) where it is; FOREIGN where it is not one plain float or double. */
static zs_status look_at_step(const zs_optim *plan, const zs_member *member, zs_view *out)
{
    plain_memory found;
    bool plain;
    zs_where where = plan->live != NULL ? out->run.device->where : (zs_where){ZS_ON_CPU, 0};
    ZS_TRY(find_memory(member->step, where, &found, &plain));
    if (!plain || found.numel != 1 || (found.dtype != ZS_F32 && found.dtype != ZS_F64)) {
        out->verdict = ZS_MEMBER_FOREIGN;
        return ZS_OK;
    }
    out->step_dtype = found.dtype;
    out->step_data = found.data;
    if (plan->live != NULL) return ZS_OK; /* read there */
    out->step = 1 + (out->step_dtype == ZS_F32 ? (double)*(float *)out->step_data : *(double *)out->step_data);
    return ZS_OK;
}

/* Finds the memory of a state tensor of `run`; `fits`: it is as the rule expects. */
static zs_status find_state(const zs_tensor *tensor, zs_where where, int state, zs_run *run, bool *fits)
{
    zs_tensor_info info;
    const zs_dtype wide = run->form == ZS_FORM_WIDE ? ZS_F32 : run->dtype;
    ZS_TRY(zs_tensor_describe(tensor, &info));
    const bool bytes = run->form == ZS_FORM_CODED || state >= ZS_STATE_FIRST_SCALE;
    const zs_dtype dtype = bytes ? ZS_BYTES : wide;
    *fits = zs_same_where(info.where, where) && info.contiguous && info.dtype == dtype &&
            info.itemsize == zs_run_state_itemsize(run, state) && info.numel == zs_run_state_numel(state, run->numel);
    if (!*fits || info.numel == 0) return ZS_OK; /* an empty shard has no bytes to find */
    return zs_tensor_data(tensor, &run->state[state]);
}

/* (Compact steps) The number that the member's groups are counted from. */
static void look_at_groups(const zs_member *member, zs_view *out)
{
    zs_run *run = &out->run;
    bool low = run->state[ZS_STATE_LOW] != NULL;
    run->number = (uint64_t)member->number;
    if (run->dtype != ZS_BF16 && (run->dtype != ZS_F32 || low)) out->verdict = ZS_MEMBER_FOREIGN;
    if (member->number < 0 || member->numel != run->numel)
        out->verdict = ZS_MEMBER_STATELESS; /* as in look_at_number */
    else if (run->numel > 0 && member->number % ZS_GROUP != 0)
        out->verdict = ZS_MEMBER_FOREIGN;
}

/* Finds a taken member's state; STATELESS where some is missing, FOREIGN where some does not fit the parameter. */
static zs_status look_at_state(const zs_optim *plan, const zs_member *member, zs_where where, zs_view *out)
{
    if (!has_state(plan, member)) {
        out->verdict = ZS_MEMBER_STATELESS;
        return ZS_OK;
    }
    zs_run *run = &out->run;
    run->form = form_of(plan, member);
    for (int s = 0; s < ZS_OPTIM_STATES; s++) {
        bool fits = true;
        run->state[s] = NULL;
        if (uses(plan, member, s)) ZS_TRY(find_state(member->state[s], where, s, run, &fits));
        if (!fits) out->verdict = ZS_MEMBER_FOREIGN;
    }
    if (plan->compact && out->verdict == ZS_MEMBER_TAKEN) look_at_groups(member, out);
    out->step_data = NULL;
    return plan->rule == ZS_RULE_ADAM ? look_at_step(plan, member, out) : ZS_OK;
}

static zs_status look_at_memory(const zs_optim *plan, const zs_member *member, const zs_grad_info *grad, zs_view *out)
{
    zs_run *run = &out->run;
    zs_tensor_info info;
    plain_memory found;
    bool plain = false;
    ZS_TRY(zs_tensor_describe(member->param, &info));
    ZS_TRY(zs_optim_device_of(member->param, &info, &run->device));
    zs_where where = run->device != NULL ? run->device->where : (zs_where){ZS_ON_OTHER, 0};
    ZS_TRY(find_described(member->param, &info, where, &found, &plain));
    plain = plain && run->device != NULL && grad->dense && zs_same_where(grad->where, where);
    plain = plain && grad->dtype == found.dtype && grad->numel == found.numel;
    run->param = found.data;
    run->dtype = found.dtype;
    run->numel = found.numel;
    run->grad = grad->data;
    run->factor = zs_pending_of(grad->mem);
    out->grad_version = grad->version;
    out->verdict = plain ? ZS_MEMBER_TAKEN : ZS_MEMBER_FOREIGN;
    return plain ? look_at_state(plan, member, where, out) : ZS_OK;
}

/* (Dithered steps) Numbers the elements of a member; refuses one that would silently be rounded to nearest. */
static zs_status look_at_number(const zs_member *member, zs_view *out)
{
    zs_run *run = &out->run;
    bool taken = out->verdict == ZS_MEMBER_TAKEN;
    if (run->dtype == ZS_F16 || (run->dtype == ZS_BF16 && out->verdict == ZS_MEMBER_FOREIGN))
        return ZS_FAIL(
            ZS_ERR_UNSUPPORTED,
            "stochastic_rounding requires contiguous bfloat16 parameters with dense gradients and state of the same "
            "dtype, but a parameter of %lld elements %s: move it to a param group with stochastic_rounding=False",
            (long long)run->numel, run->dtype == ZS_F16 ? "is float16" : "does not qualify");
    run->dithered = run->dtype == ZS_BF16;
    run->number = (uint64_t)member->number;
    /* An FSDP(...) in between has sharded the parameters. */
    if (taken && (member->number < 0 || member->numel != run->numel)) out->verdict = ZS_MEMBER_STATELESS;
    return ZS_OK;
}

static zs_status look_at(const zs_optim *plan, const zs_member *member, zs_view *out)
{
    zs_grad_info grad;
    ZS_TRY(zs_grad_describe(member->param, &grad));
    out->verdict = ZS_MEMBER_IDLE;
    out->run.dithered = false;
    if (!grad.defined) return ZS_OK;
    ZS_TRY(look_at_memory(plan, member, &grad, out));
    if (plan->compact && out->verdict == ZS_MEMBER_FOREIGN)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "an optimizer with 8-bit state steps contiguous float32 and bfloat16 parameters with dense "
                       "gradients, and state that it made or loaded, but a parameter of %lld elements does not "
                       "qualify: give it to another optimizer",
                       (long long)member->numel);
    return plan->dithered ? look_at_number(member, out) : ZS_OK;
}

/* --- joining ------------------------------------------------------------------------------------------------------ */

/* The constants for this member: usually those of the member before. */
static const zs_constants *constants_for(zs_optim *plan, const zs_hyper *hyper, double step, bool first)
{
    bool adam = plan->rule == ZS_RULE_ADAM;
    if (plan->n_constants > 0) {
        const zs_constants *last = &plan->constants[plan->n_constants - 1];
        if (adam ? last->step == step : last->first == first) return last;
    }
    zs_constants *made = &plan->constants[plan->n_constants++];
    made->step = step;
    made->first = first;
    made->seed = hyper->seed;
    made->round = hyper->round;
    if (adam) {
        made->adam_f32 = zs_adam_at_f32(hyper, step);
        made->adam_f64 = zs_adam_at_f64(hyper, step);
    } else {
        made->sgd_f32 = zs_sgd_of_f32(hyper, first);
        made->sgd_f64 = zs_sgd_of_f64(hyper, first);
    }
    return made;
}

static bool follows(const void *next, const void *start, size_t bytes)
{
    return (const char *)next == (const char *)start + bytes;
}

/* Does `next` continue where `run` ends, in all its memory and with the same constants? */
static bool adjoins(const zs_run *run, const zs_run *next)
{
    if (run->constants != next->constants || run->dtype != next->dtype || run->device != next->device) return false;
    if (run->factor != next->factor) return false;
    bool numbered = run->dithered || run->form != ZS_FORM_PLAIN;
    if (run->form != next->form || (numbered && next->number != run->number + (uint64_t)run->numel)) return false;
    size_t bytes = (size_t)run->numel * zs_dtype_size(run->dtype);
    bool all = follows(next->param, run->param, bytes) && follows(next->grad, run->grad, bytes);
    for (int s = 0; s < ZS_OPTIM_STATES; s++) {
        all = all && (run->state[s] == NULL) == (next->state[s] == NULL) &&
              (run->state[s] == NULL || follows(next->state[s], run->state[s], zs_run_state_bytes(run, s, run->numel)));
    }
    return all;
}

static void join(zs_optim *plan, const zs_run *next)
{
    if (next->numel == 0) return;
    bool queues = next->device->ops->queues;
    zs_run *runs = queues ? plan->queued : plan->runs;
    int64_t *n = queues ? &plan->n_queued : &plan->n_runs;
    if (*n > 0 && adjoins(&runs[*n - 1], next))
        runs[*n - 1].numel += next->numel;
    else
        runs[(*n)++] = *next;
}

zs_status zs_optim_prepare(zs_optim *plan, const zs_hyper *hyper, const zs_live *live)
{
    plan->full = plan->rule == ZS_RULE_ADAM ? hyper->amsgrad : hyper->momentum != 0;
    plan->dithered = hyper->dithered;
    plan->live = live;
    plan->hyper = *hyper;
    plan->n_runs = plan->n_queued = plan->n_constants = 0;
    for (int64_t i = 0; i < plan->n_members; i++)
        ZS_TRY(look_at(plan, &plan->members[i], &plan->views[i]));
    ZS_TRY(live != NULL ? zs_live_check(plan) : zs_live_refuse_capture(plan));
    for (int64_t i = 0; i < plan->n_members; i++) {
        zs_view *found = &plan->views[i];
        if (found->verdict != ZS_MEMBER_TAKEN) continue;
        const zs_member *member = &plan->members[i];
        found->run.constants =
            live != NULL ? zs_live_constants(plan, i) : constants_for(plan, hyper, found->step, member->first);
        join(plan, &found->run);
    }
    int64_t total = 0;
    for (int64_t i = 0; i < plan->n_runs; i++)
        plan->ends[i] = total += plan->runs[i].numel;
    return ZS_OK;
}

/* --- stepping ----------------------------------------------------------------------------------------------------- */

/* Index of the run that holds element `at`: the first whose end lies behind it. */
static int64_t run_holding(const zs_optim *plan, int64_t at)
{
    int64_t low = 0, high = plan->n_runs;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (plan->ends[middle] > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Elements [begin, end) of all runs laid end to end. */
static void update_part(void *ctx, int64_t begin, int64_t end)
{
    const zs_optim *plan = ctx;
    for (int64_t i = run_holding(plan, begin); i < plan->n_runs; i++) {
        const zs_run *run = &plan->runs[i];
        int64_t start = plan->ends[i] - run->numel;
        if (start >= end) break;
        zs_update_part(&(zs_update_job){plan->rule, plan->full, run, NULL, 1}, begin - start, end - start);
    }
}

static zs_status update_on_disk(const zs_optim *plan)
{
    zs_status status = ZS_OK;
    zs_pager_open();
    for (int64_t i = 0; i < plan->n_runs && status == ZS_OK; i++)
        status = zs_update_on_disk(&(zs_update_job){plan->rule, plan->full, &plan->runs[i], NULL, 1});
    zs_status written = zs_pager_close();
    return status != ZS_OK ? status : written;
}

/* All runs of a device in a call; usually there is one device. */
static zs_status queue_updates(const zs_optim *plan)
{
    if (plan->live != NULL) ZS_TRY(zs_live_queue_constants(plan));
    const zs_run *runs = plan->queued;
    for (int64_t i = 0, end; i < plan->n_queued; i = end) {
        for (end = i + 1; end < plan->n_queued && runs[end].device == runs[i].device;)
            end++;
        zs_update_job job = {plan->rule, plan->full, &runs[i], plan->live, end - i};
        ZS_TRY(runs[i].device->ops->update(runs[i].device, &job));
    }
    return ZS_OK;
}

/* Bytes of a run that the loops read and write, each once. */
static uint64_t bytes_of(const zs_run *run)
{
    uint64_t bytes = 3 * (uint64_t)run->numel * zs_dtype_size(run->dtype); /* the parameter twice, the gradient */
    for (int s = 0; s < ZS_OPTIM_STATES; s++)
        bytes += 2 * zs_run_state_bytes(run, s, run->numel);
    return bytes;
}

void zs_optim_count(zs_optim *plan)
{
    for (int64_t i = 0; i < plan->n_members; i++) {
        const zs_view *found = &plan->views[i];
        if (found->verdict != ZS_MEMBER_TAKEN) continue;
        bool counts = found->step_data != NULL && plan->live == NULL; /* there, it is counted on the device */
        if (counts && found->step_dtype == ZS_F32) *(float *)found->step_data = (float)found->step;
        if (counts && found->step_dtype == ZS_F64) *(double *)found->step_data = found->step;
        plan->members[i].first = false;
        zs_tensor_bump_version(plan->members[i].param);
    }
}

zs_status zs_optim_step(zs_optim *plan)
{
    int64_t total = plan->n_runs > 0 ? plan->ends[plan->n_runs - 1] : 0;
    ZS_TRY(queue_updates(plan));
    if (zs_pager_active())
        ZS_TRY(update_on_disk(plan));
    else if (total > 0)
        zs_parallel_for(total, ZS_UPDATE_GRAIN, update_part, plan);
    for (int64_t i = 0; i < plan->n_runs; i++)
        zs_count_bytes(bytes_of(&plan->runs[i]));
    zs_optim_count(plan);
    return ZS_OK;
}
