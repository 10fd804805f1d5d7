/* memory.h - reference-counted blocks of bytes.
 *
 * Parameters, graph nodes and user-held views can outlive the model, so the bytes under them are owned by counted
 * references, never by a module. Code that stores a pointer into a block keeps a reference to the block.
 */
#ifndef ZS_MEMORY_H
#define ZS_MEMORY_H

#include "base/refs.h"
#include "base/status.h"

/* A unit's use of a block. */
typedef enum zs_mem_role { ZS_MEM_PLAIN, ZS_MEM_SHARD, ZS_MEM_GRAD_SHARD, ZS_MEM_LOCAL_GRAD } zs_mem_role;

struct zs_device;

typedef struct zs_mem {
    void *ptr;                           /* first byte, at least 64-byte aligned */
    size_t bytes;                        /* length */
    zs_refs refs;                        /* counted references */
    void (*destroy)(struct zs_mem *mem); /* releases what lies behind; does not free the struct */
    void *owner;                         /* for destroy */
    zs_mem_role role;                    /* a unit's use of it, so that a tensor on it can be recognised */
    void *user;                          /* that unit; NULL once it is freed */
    const struct zs_device *device;      /* the device that computes with it; NULL: the CPU */
    bool on_host;                        /* (a GPU's) pinned memory of the host, which the GPU can reach */
    float pending;                       /* not 0: pending factor of this block of float32; see device/pending.h */
} zs_mem;

/* New block of `bytes` private zeroed memory (mmap, huge pages advised). Pages cost nothing until touched. */
zs_status zs_mem_new_private(size_t bytes, zs_mem **out);

/* From now on, `make` makes these blocks instead (kept.c). */
void zs_mem_divert(zs_status (*make)(size_t bytes, zs_mem **out));

/* Does another function make them? */
bool zs_mem_is_diverted(void);

/* New block around existing memory; `destroy` (may be NULL) runs when the last reference goes. */
zs_status zs_mem_wrap(void *ptr, size_t bytes, void (*destroy)(zs_mem *), void *owner, zs_mem **out);

/* Counts a mapping of memory of this process; how many there have been, of private blocks and of shared ones. */
void zs_mem_count_mapping(void);
long zs_mem_mappings(void);

/* New block of `bytes` on the heap, not zeroed. */
zs_status zs_mem_new_on_heap(size_t bytes, zs_mem **out);

/* Reports `bytes` just freed on the heap, for example by torch. malloc keeps such memory, gigabytes of it while a
 * model's parameters move to shards one by one; after every 32 MiB this asks it to return the memory to the system. 0:
 * now, if there is any. */
void zs_mem_heap_freed(size_t bytes);

/* Number of forks that led to this process since the first call; differs between parent and child. */
unsigned zs_lifetime(void);

/* Adds a reference; returns `mem`. */
zs_mem *zs_mem_retain(zs_mem *mem);

/* Drops a reference; NULL is allowed. Any thread. */
void zs_mem_release(zs_mem *mem);

/* Bytes rounded up to a multiple of `align` (a power of two). */
static inline size_t zs_round_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

#endif
