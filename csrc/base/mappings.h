/* mappings.h - where this process has mapped files of memory. */
#ifndef ZS_MAPPINGS_H
#define ZS_MAPPINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

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
