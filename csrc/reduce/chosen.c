/* chosen.c - see chosen.h. */
#include "reduce/chosen.h"

#include <stdlib.h>

#include "device/pending.h"
#include "reduce/squares.h"
#include "unit/context.h"

/* The index of the parameter whose .grad this is, searched from `from` on; -1: none. */
static int64_t param_of(const zs_unit *unit, const zs_tensor *grad, int64_t from)
{
    for (int64_t k = 0; k < unit->n_params; k++) {
        const int64_t i = (from + k) % unit->n_params;
        if (unit->params[i].grad != NULL && zs_tensor_same(unit->params[i].grad, grad)) return i;
    }
    return -1;
}

/* The index of a flat in the list, where it is added if need be; -1: out of memory. */
static int64_t place_of(zs_chosen *all, zs_unit *unit, int f)
{
    for (int64_t k = all->n - 1; k >= 0; k--)
        if (all->flats[k].unit == unit && all->flats[k].flat == f) return k;
    if (all->n == all->room) {
        int64_t room = 2 * all->room + 16;
        zs_chosen_flat *flats = realloc(all->flats, (size_t)room * sizeof *flats);
        if (flats == NULL) return -1;
        all->flats = flats;
        all->room = room;
    }
    all->flats[all->n] = (zs_chosen_flat){.unit = unit, .flat = f};
    return all->n++;
}

/* The flat of the block; -1: none. */
static int flat_of(const zs_unit *unit, const zs_mem *mem)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].grad_mem == mem) return f;
    return -1;
}

zs_status zs_chosen_add(zs_chosen *all, const zs_tensor *grad, int64_t *at)
{
    const zs_mem *mem = zs_tensor_mem(grad);
    zs_unit *unit = mem != NULL && mem->role == ZS_MEM_GRAD_SHARD ? mem->user : NULL;
    const int f = unit != NULL ? flat_of(unit, mem) : -1;
    *at = -1;
    if (f < 0) return ZS_OK;
    const int64_t known = all->n;
    const int64_t place = place_of(all, unit, f);
    if (place < 0) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for a list of gradients");
    zs_chosen_flat *chosen = &all->flats[place];
    const int64_t i = param_of(unit, grad, all->n > known ? 0 : chosen->last + 1);
    chosen->twice = chosen->twice || i < 0 || unit->params[i].chosen;
    *at = place;
    if (i < 0) return ZS_OK; /* a view of one */
    unit->params[i].chosen = true;
    chosen->last = i;
    chosen->n++;
    return ZS_OK;
}

/* Has the flat's memory no other name than its parameters' .grad, through which it could be read or written unseen? */
static bool has_one_name(const zs_chosen_flat *chosen)
{
    int64_t views = 0;
    for (int64_t i = 0; i < chosen->unit->n_params; i++) {
        const zs_param *param = &chosen->unit->params[i];
        views += param->flat == chosen->flat && param->grad != NULL;
    }
    return zs_storage_users(chosen->unit->flats[chosen->flat].grads) == 1 + views;
}

/* Are the gradients in the list those that count in the flat's squares? */
static bool are_those_squared(const zs_chosen_flat *chosen)
{
    const zs_unit *unit = chosen->unit;
    int64_t squared = 0;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        if (param->flat != chosen->flat || !param->squared) continue;
        if (!param->chosen) return false;
        squared++;
    }
    return !chosen->twice && squared == chosen->n && has_one_name(chosen);
}

bool zs_chosen_is_squared(const zs_chosen_flat *chosen)
{
    return are_those_squared(chosen) && zs_squares_hold(chosen->unit, chosen->flat);
}

bool zs_chosen_is_finite(const zs_chosen_flat *chosen)
{
    return are_those_squared(chosen) && zs_squares_finite(chosen->unit, chosen->flat);
}

static bool can_wait(const zs_chosen_flat *chosen)
{
    const zs_unit *unit = chosen->unit;
    const zs_flat *flat = &unit->flats[chosen->flat];
    int64_t shown = 0;
    if (flat->dtype != ZS_F32 || unit->offloads.grads || unit->stepping != NULL || chosen->twice) return false;
    if (zs_context_device(unit->context)->ops->queues) return false;
    for (int64_t i = 0; i < unit->n_params; i++) {
        const zs_param *param = &unit->params[i];
        bool is = false;
        if (param->flat != chosen->flat || param->grad == NULL) continue;
        if (param->below) return false;
        if (zs_tensor_alive(param->tensor) && zs_grad_is(param->tensor, param->grad, &is) != ZS_OK) return false;
        if (is != param->chosen) return false;
        shown += is;
    }
    return shown == chosen->n && has_one_name(chosen);
}

bool zs_chosen_scale_later(const zs_chosen_flat *chosen, float factor)
{
    zs_unit *unit = chosen->unit;
    if (!can_wait(chosen)) return false;
    const bool squared = zs_squares_hold(unit, chosen->flat);
    zs_pending_set(unit->flats[chosen->flat].grad_mem, factor);
    for (int64_t i = 0; i < unit->n_params; i++)
        if (unit->params[i].chosen && unit->params[i].flat == chosen->flat)
            zs_tensor_bump_version(unit->params[i].grad);
    if (squared) zs_squares_follow(unit, chosen->flat);
    return true;
}

void zs_chosen_free(zs_chosen *all)
{
    for (int64_t k = 0; k < all->n; k++)
        for (int64_t i = 0; i < all->flats[k].unit->n_params; i++)
            all->flats[k].unit->params[i].chosen = false;
    free(all->flats);
}
