/* comm_types.h - what is handed to a transport, and what comes back. See comm.h. */
#ifndef ZS_COMM_TYPES_H
#define ZS_COMM_TYPES_H

#include "base/memory.h"
#include "base/passes.h"
#include "base/refs.h"
#include "base/status.h"
#include "base/wire.h"
#include "device/arena.h"
#include "device/device.h"

enum { ZS_MAX_FLATS = 8 }; /* dtype x trainable groups in one unit */

typedef struct zs_comm zs_comm;
typedef struct zs_cunit zs_cunit;
typedef struct zs_reader zs_reader;
typedef struct zs_gathering zs_gathering;

/* Where a gather goes, and what of. */
typedef struct zs_target {
    zs_mem *mem; /* borrowed; kept where a gather that was broken off may still write there */
    char *full;  /* within it, world * shard_bytes */
    /* How shards cross hosts, where the transport has a code_room for them: then `full` gets what their codes say,
     * on all ranks alike. Numbers of this dtype. */
    zs_wire code;
    zs_dtype dtype;
} zs_target;

/* One flat buffer. Full size is world * shard_bytes; rank r's shard is bytes [r*shard_bytes, (r+1)*shard_bytes). */
typedef struct zs_flat_mem {
    zs_mem *mem;        /* counted reference to the memory under `shard` (and `full`) */
    char *shard;        /* this rank's shard, read-write, zeroed at birth */
    char *full;         /* the whole full buffer if it is always addressable (shm, self), else NULL: gather it */
    size_t shard_bytes; /* multiple of shard_align */
    uint64_t key;       /* the transport's own name for it */
} zs_flat_mem;

/* Full-size gradient memory. */
typedef struct zs_bucket {
    char *ptr;    /* this rank's own packed gradients */
    size_t bytes; /* capacity */
    uint64_t key; /* the transport's own name for it */
    zs_mem *mem;  /* counted reference */
} zs_bucket;

/* Which model a collective is for, for messages. */
typedef struct zs_model {
    uint64_t number; /* of its reader, from 1 on; 0: none */
    char name[32];   /* its class, cut off */
} zs_model;

/* What a reader session belongs to: a pass, with two kinds of forward. A rank that evaluates while others train
 * takes no part in their forward, and they need none in its. */
typedef enum zs_pass {
    ZS_PASS_TRAIN,    /* a backward may follow: autograd records */
    ZS_PASS_EVALUATE, /* any other forward, and sessions opened by hand */
    ZS_PASS_BACKWARD
} zs_pass;

/* What a reader session is for. */
typedef struct zs_reading {
    zs_pass pass;
    bool eval_mode; /* the module is in evaluation mode */
    bool changed;   /* the shards are not as the last known write has left them, see sample.h */
} zs_reading;

/* What a transport has on this rank for itself, in bytes. */
typedef struct zs_room {
    size_t fixed;          /* without units, and with one reader */
    size_t record;         /* of a unit, as long as it lives */
    size_t sent, received; /* of one round, while it is out */
    size_t talk;           /* of what is said before each collective */
    size_t piece;          /* of a broadcast, at most */
} zs_room;

#endif
