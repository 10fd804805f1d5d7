/* hold.c - see hold.h. */
#include "hold.h"

#include <stdatomic.h>
#include <string.h>

/* Units of this process that are held. */
static _Atomic long holders;

bool zs_hold_any(void)
{
    return atomic_load(&holders) > 0;
}

/* Puts a copy under the full storage where it is a mapping; a slot is one already. Either is known as held. */
static zs_status hold_flat(zs_unit *unit, zs_flat *flat)
{
    if (flat->full_mem == NULL) {
        zs_mem *copy = NULL;
        size_t bytes = zs_layout_full_bytes(&flat->layout);
        ZS_TRY(zs_mem_new_private(bytes, &copy));
        memcpy(copy->ptr, flat->mem.full, bytes);
        zs_status status = zs_storage_fill(flat->full, copy, copy->ptr);
        if (status != ZS_OK) {
            zs_mem_release(copy);
            return status;
        }
        flat->full_mem = copy; /* given back as a slot is, of which the arena then knows nothing */
    }
    flat->full_mem->role = ZS_MEM_HELD;
    flat->full_mem->user = unit;
    return ZS_OK;
}

zs_status zs_hold(zs_unit *unit)
{
    if (unit->held) return ZS_OK;
    ZS_TRY(zs_unit_unshard(unit));
    unit->held = true;
    atomic_fetch_add(&holders, 1);
    zs_status status = ZS_OK;
    for (int f = 0; f < unit->n_flats && status == ZS_OK; f++)
        status = hold_flat(unit, &unit->flats[f]);
    if (status != ZS_OK) (void)zs_unit_reshard(unit, ZS_SHARDED);
    return status;
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
        if (unit->flats[f].mem.full != NULL) total += zs_layout_full_bytes(&unit->flats[f].layout);
    return total;
}
