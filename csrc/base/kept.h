/* kept.h - memory that outlives its process, and where all such memory lies.
 *
 * With keeping on, blocks that would be private lie in one file of memory, so that a descriptor of it is enough to read
 * them when the process has been killed. Shared blocks lie in files anyway. All these mappings are listed here. */
#ifndef ZS_KEPT_H
#define ZS_KEPT_H

#include "base/memory.h"

/* From now on, in this process, zs_kept_new is for blocks that would be private. Idempotent. */
zs_status zs_kept_begin(void);

/* Has it begun? */
bool zs_kept_is_on(void);

/* New zeroed block in that file; when it is freed, its pages go back. */
zs_status zs_kept_new(size_t bytes, zs_mem **out);

/* A mapping of a part of a file of memory. */
typedef struct zs_mapping {
    char *base;
    size_t bytes;
    uint64_t offset; /* in the file */
    int fd;          /* borrowed */
} zs_mapping;

/* Lists a mapping, until it is forgotten. ZS_ERR_MEMORY. Any thread. */
zs_status zs_mapping_note(const zs_mapping *mapping);
void zs_mapping_forget(const void *base);

/* All mappings, in no order: *new* array, for free(). */
zs_status zs_mappings_copy(zs_mapping **out, size_t *n);

/* The mapping that holds these bytes; false: they are other memory. */
bool zs_mapping_of(const void *at, size_t bytes, zs_mapping *out);

#endif
