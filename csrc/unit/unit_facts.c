/* unit_facts.c - a unit's names and sizes. See unit.h. */
#define _GNU_SOURCE /* strdup */
#include "base/tree.h"
#include "unit/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- names -------------------------------------------------------------------------------------------------------- */

char *zs_unit_message(const char *name)
{
    static const char text[] =
        "the parameters of unit '%s' are sharded: their full values exist only during the unit's forward and backward; "
        "call the module itself, call module.unshard() first (and clone() what you keep of it), or read "
        "model.state_dict() (on all ranks)";
    const char *label = zs_unit_label(name);
    size_t size = sizeof text + strlen(label);
    char *message = malloc(size);
    if (message != NULL) snprintf(message, size, text, label);
    return message;
}

zs_profile *zs_unit_profile(const zs_unit *unit, const char *what)
{
    return zs_profile_begin("zshard::%s (%s)", what, *unit->name ? unit->name : "root");
}

/* `name` with `to` in place of its first `prefix` characters; new. */
static char *renamed(const char *name, size_t prefix, const char *to)
{
    const char *rest = name + prefix + (prefix > 0);
    size_t size = strlen(to) + strlen(rest) + 2;
    char *made = malloc(size);
    if (made != NULL) snprintf(made, size, "%s%s%s", to, *to ? "." : "", rest);
    return made;
}

static zs_status replace(char **text, char *made)
{
    if (made == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating a name");
    free(*text);
    *text = made;
    return ZS_OK;
}

zs_status zs_unit_rename(zs_unit *unit, const char *name)
{
    size_t prefix = strlen(unit->name);
    for (int64_t i = 0; i < unit->n_params; i++)
        ZS_TRY(replace(&unit->params[i].name, renamed(unit->params[i].name, prefix, name)));
    ZS_TRY(replace(&unit->name, strdup(name)));
    if (unit->cunit != NULL) ZS_TRY(zs_cunit_rename(unit->context->ranks.all, unit->cunit, name));
    ZS_TRY(replace(&unit->sharded_message, zs_unit_message(name)));
    for (int f = 0; f < unit->n_flats && !zs_unit_is_full(unit); f++)
        ZS_TRY(zs_storage_clear(unit->flats[f].full, unit->sharded_message));
    return ZS_OK;
}

/* --- sizes -------------------------------------------------------------------------------------------------------- */

/* Bytes of the copy in the compute dtype; 0: none. */
static size_t low_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats && !unit->record.is.replicated; f++)
        if (unit->flats[f].compute != unit->flats[f].dtype) total += zs_flat_low_bytes(&unit->flats[f]);
    return total;
}

size_t zs_unit_shard_bytes(const zs_unit *unit)
{
    size_t total = low_bytes(unit);
    for (int f = 0; f < unit->n_flats; f++)
        total += zs_flat_own_bytes(unit, &unit->flats[f]);
    return total;
}

size_t zs_unit_secondary_bytes(const zs_unit *unit)
{
    const zs_comm *replica_group = unit->context->ranks.replica_group;
    size_t total = 0;
    for (int f = 0; f < unit->n_flats && replica_group != NULL && !unit->record.is.replicated; f++)
        total += zs_flat_low_bytes(&unit->flats[f]) * (size_t)replica_group->world;
    return total;
}

size_t zs_unit_full_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats; f++)
        total += (size_t)zs_layout_full_numel(&unit->flats[f].layout) * unit->flats[f].compute_size;
    return total;
}

size_t zs_unit_section_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].wire_shard_bytes > 0) total += zs_flat_wire_bytes(&unit->flats[f]);
    return total;
}

size_t zs_unit_local_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].trainable) total += zs_layout_full_bytes(&unit->flats[f].layout);
    return total;
}

size_t zs_unit_bucket_bytes(const zs_unit *unit)
{
    return zs_unit_section_bytes(unit) * (size_t)zs_tree_sections(unit->context->tree);
}

bool zs_unit_reduces(const zs_unit *unit)
{
    const zs_context *context = unit->context;
    return context->ranks.all->world > 1 || !unit->record.is.fixed || context->tree != NULL;
}

size_t zs_unit_grad_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats && zs_unit_reduces(unit); f++)
        if (unit->flats[f].trainable) total += zs_flat_own_bytes(unit, &unit->flats[f]);
    return total;
}

size_t zs_unit_held_grad_bytes(const zs_unit *unit)
{
    size_t total = 0;
    for (int f = 0; f < unit->n_flats && !unit->offloads.grads; f++) {
        const zs_flat *flat = &unit->flats[f];
        if (flat->grad_mem != NULL && !unit->borrows) total += flat->grad_mem->bytes;
        if (flat->spare_mem != NULL) total += flat->spare_mem->bytes;
    }
    return total + (unit->local != NULL ? unit->local->bytes : 0);
}
