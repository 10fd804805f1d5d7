/* pinned.c - counts the units that pin.c has unsharded by hand, for the layers below it. See unit.h. */
#include "unit/unit.h"

#include "unit/context.h"

#include <stdatomic.h>

/* Units of this process that are pinned. */
static _Atomic long holders;

bool zs_pinned_any(void)
{
    return atomic_load(&holders) > 0;
}

void zs_pinned_begin(void)
{
    atomic_fetch_add(&holders, 1);
}

void zs_pinned_end(const zs_unit *unit)
{
    if (unit->record.pinned) atomic_fetch_sub(&holders, 1);
}

size_t zs_pinned_bytes(const zs_unit *unit)
{
    size_t total = 0;
    bool shared = false;
    for (int f = 0; f < unit->n_flats && unit->record.pinned; f++)
        if (unit->flats[f].full_mem != NULL && !zs_arena_has(unit->context->arena, unit->flats[f].full_mem, &shared))
            total += zs_flat_full_bytes(unit, &unit->flats[f]);
    return total;
}
