/* held.c - see held.h. */
#include "unit/held.h"

#include <stdatomic.h>

/* Units of this process that are held. */
static _Atomic long holders;

bool zs_hold_any(void)
{
    return atomic_load(&holders) > 0;
}

void zs_hold_mark(zs_unit *unit)
{
    unit->held = true;
    atomic_fetch_add(&holders, 1);
}

void zs_hold_end(zs_unit *unit)
{
    if (!unit->held) return;
    unit->held = false;
    atomic_fetch_sub(&holders, 1);
    for (int f = 0; f < unit->n_flats; f++) {
        zs_mem *mem = unit->flats[f].full_mem;
        if (mem == NULL) continue;
        mem->role = ZS_MEM_PLAIN;
        mem->user = NULL;
    }
}

size_t zs_hold_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats && unit->held; f++)
        if (zs_flat_source(unit, &unit->flats[f])->full != NULL) total += zs_flat_full_bytes(unit, &unit->flats[f]);
    return total;
}
