/* comm_types.h - arguments and results of a transport. See comm.h. */
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
typedef struct zs_turns zs_turns;

/* A gather's destination. */
typedef struct zs_target {
    zs_mem *mem; /* borrowed; pinned while an interrupted gather may still write there */
    char *full;  /* within it, world * shard_bytes */
    /* The code in which shards cross hosts, if the transport has a code_room for it: then all ranks get the decoded
     * values, this rank included. Numbers of this dtype. */
    zs_wire code;
    zs_dtype dtype;
} zs_target;

/* One flat buffer. Full size is world * shard_bytes; rank r's shard is bytes [r*shard_bytes, (r+1)*shard_bytes). */
typedef struct zs_flat_mem {
    zs_mem *mem;        /* counted reference to the memory under `shard` (and `full`) */
    char *shard;        /* this rank's shard, read-write, zeroed at first */
    char *full;         /* the full buffer if it is always addressable (shm, self), else NULL: gather it */
    size_t shard_bytes; /* multiple of shard_align */
    uint64_t key;       /* the transport's own number of it */
} zs_flat_mem;

/* Full-size gradient memory. */
typedef struct zs_bucket {
    char *ptr;    /* this rank's own packed gradients; NULL: at rest */
    size_t bytes; /* capacity */
    uint64_t key; /* the transport's own number of it */
    zs_mem *mem;  /* counted reference */
} zs_bucket;

/* Bytes to send to a rank, and to receive from it. */
typedef struct zs_message {
    const void *send;
    void *receive;
    size_t bytes; /* of either; not 0 */
    int peer;     /* may be this rank */
} zs_message;

/* The model that a collective is for, for messages. */
typedef struct zs_model {
    uint64_t number; /* of its reader, from 1; 0: none */
    char name[32];   /* its class, truncated */
} zs_model;

/* The pass that a reader session is for; there are two kinds of forward. A rank that evaluates while others train
 * takes no part in their forward, and they need none in its. */
typedef enum zs_pass {
    ZS_PASS_TRAIN,    /* a backward may follow: autograd records */
    ZS_PASS_EVALUATE, /* any other forward, and sessions opened by hand */
    ZS_PASS_BACKWARD
} zs_pass;

/* The purpose of a reader session. */
typedef struct zs_reading {
    zs_pass pass;
    bool eval_mode; /* the module is in evaluation mode */
    bool changed;   /* the shards have changed since the last known write, see engine/history.c */
} zs_reading;

/* A transport's own memory on this rank, in bytes. */
typedef struct zs_room {
    size_t fixed;          /* without units, and with one reader */
    size_t record;         /* of a unit, as long as it lives */
    size_t sent, received; /* of one round, while it is out */
    size_t talk;           /* for the messages before each collective */
    size_t piece;          /* of a broadcast, at most */
} zs_room;

#endif
