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

static size_t compute_bytes(const zs_flat *flat)
{
    return (size_t)zs_layout_full_numel(&flat->layout) * flat->compute_size;
}

/* Puts a copy under the full storage where it is a mapping; a slot is one already. Either is known as held. */
static zs_status hold_flat(zs_unit *unit, zs_flat *flat)
{
    if (flat->full_mem == NULL) {
        zs_mem *copy = NULL;
        const char *mapped = zs_flat_source(flat, flat->compute != flat->dtype)->full;
        ZS_TRY(zs_mem_new_private(compute_bytes(flat), &copy));
        memcpy(copy->ptr, mapped, compute_bytes(flat));
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
        if (zs_flat_source(&unit->flats[f], unit->flats[f].low.mem != NULL)->full != NULL)
            total += compute_bytes(&unit->flats[f]);
    return total;
}
