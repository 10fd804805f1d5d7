/* squares.c - see squares.h. */
#include "reduce/squares.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/pending.h"
#include "unit/context.h"

/* After so many backwards without a question, no squares are taken. */
enum { PATIENCE = 64 };

zs_status zs_squares_ask(zs_flat *flat)
{
    if (flat->squares == NULL) flat->squares = calloc(1, sizeof *flat->squares);
    if (flat->squares == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory for the sum of a norm");
    flat->squares_due = PATIENCE;
    return ZS_OK;
}

void zs_squares_begin(zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++) {
        zs_flat *flat = &unit->flats[f];
        flat->squared = false;
        if (flat->squares_due > 0) flat->squares_due--;
    }
    for (int64_t i = 0; i < unit->n_params; i++)
        unit->params[i].squared = false;
}

zs_exact *zs_squares_renew(zs_unit *unit, zs_flat *flat)
{
    bool here = !unit->offloads.grads && unit->stepping == NULL;
    bool wanted = here && flat->squares_due > 0 && !zs_context_device(unit->context)->ops->queues;
    flat->squared = wanted && !unit->record.is.replicated;
    if (!wanted) return NULL;
    memset(flat->squares, 0, sizeof *flat->squares);
    flat->squares_halvings = 0;
    return flat->squares;
}

void zs_squares_count(zs_unit *unit, int64_t i, bool takes_part)
{
    zs_param *param = &unit->params[i];
    zs_flat *flat = &unit->flats[param->flat];
    param->squared = takes_part && flat->squared;
    if (!takes_part && param->has_grad) flat->squared = false;
}

void zs_squares_end(zs_unit *unit)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->squared) param->squared_version = zs_tensor_version(param->grad);
    }
}

/* Is this gradient as it was when its squares were taken? */
static bool is_unchanged(const zs_param *param)
{
    bool shown = false;
    if (!zs_tensor_alive(param->tensor) || zs_grad_is(param->tensor, param->grad, &shown) != ZS_OK) return false;
    return shown && zs_tensor_version(param->grad) == param->squared_version;
}

/* Are all gradients of the flat as they were? */
static bool are_unchanged(const zs_unit *unit, int f)
{
    bool are = unit->flats[f].squared;
    for (int64_t i = 0; i < unit->n_params && are; i++)
        if (unit->params[i].flat == f && unit->params[i].squared) are = is_unchanged(&unit->params[i]);
    return are;
}

bool zs_squares_hold(const zs_unit *unit, int f)
{
    const zs_flat *flat = &unit->flats[f];
    const int halvings = zs_pending_halvings(flat->grad_mem);
    return halvings >= 0 && halvings == flat->squares_halvings && are_unchanged(unit, f);
}

bool zs_squares_finite(const zs_unit *unit, int f)
{
    const zs_flat *flat = &unit->flats[f];
    return fabsf(zs_pending_of(flat->grad_mem)) <= 1 && are_unchanged(unit, f) && isfinite(flat->squares->beyond);
}

void zs_squares_add(const zs_flat *flat, zs_exact *sum)
{
    if (flat->squares_halvings == 0)
        zs_exact_join(sum, flat->squares);
    else
        zs_exact_join_halved(sum, flat->squares, 2 * flat->squares_halvings);
}

void zs_squares_follow(zs_unit *unit, int f)
{
    zs_flat *flat = &unit->flats[f];
    flat->squared = fabsf(zs_pending_of(flat->grad_mem)) <= 1;
    flat->squares_halvings = zs_pending_halvings(flat->grad_mem);
    for (int64_t i = 0; i < unit->n_params; i++) {
        zs_param *param = &unit->params[i];
        if (param->flat == f && param->squared) param->squared_version = zs_tensor_version(param->grad);
    }
}

void zs_squares_spoil(const zs_mem *mem)
{
    if (mem == NULL || mem->role != ZS_MEM_GRAD_SHARD || mem->user == NULL) return;
    zs_unit *unit = mem->user;
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].grad_mem == mem) unit->flats[f].squared = false;
}
