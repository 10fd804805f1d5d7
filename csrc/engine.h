/* engine.h - the inside of an engine, for the two files that make it up: engine.c (what it has) and schedule.c (what it
 * does). Everybody else sees schedule.h.
 */
#ifndef ZS_ENGINE_H
#define ZS_ENGINE_H

#include "schedule.h"

/* Which pass is running. */
typedef enum engine_phase { IDLE, FORWARD, BACKWARD } engine_phase;

/* See schedule.h. */
struct zs_engine {
    long refs;
    zs_comm *comm;   /* all ranks, which reduce; counted reference */
    zs_comm *shards; /* those that one copy of the model is cut over, which gather; counted reference, same if all */
    int *part_of;    /* [comm->world] each rank's rank in its own `shards`; owned */
    zs_arena *arena; /* owned */
    zs_pool *grads;  /* owned: memory of its units' gradients */
    bool lent_grads; /* units that went to another engine have gradients in that memory */
    zs_bucket_pool *buckets; /* owned */
    zs_reader *reader;       /* owned */
    zs_unit **units;         /* [n] borrowed: a unit takes itself off the list; parents before children */
    size_t n;
    engine_phase phase;
    int depth;           /* forwards of units that are running, nested */
    bool recording;      /* autograd was on when the forward session began: a backward may follow */
    bool reading;        /* a reader session is open */
    bool gave_up;        /* the backward being closed was abandoned here */
    size_t next_post;    /* (collective transports) how many units have posted in this backward */
    zs_tensor **buffers; /* [n_buffers] owned weak handles */
    size_t n_buffers;
};

#endif
