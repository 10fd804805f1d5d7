/* planner.h - the inside of a plan, for the two files that make it: plan.c (passes: who is whole when) and plan_rounds.c
 * (rounds of gradients: buckets, areas, borrowed gradients).
 */
#ifndef ZS_PLANNER_H
#define ZS_PLANNER_H

#include "unit/engine.h"
#include "unit/plan.h"

/* A unit while a plan is made; what it shares names with is explained in unit.h. */
typedef struct plan_unit {
    const zs_unit *unit; /* borrowed */
    zs_cunit_spec round; /* what leaves this rank; n_slices 0: nothing */
    zs_room room;        /* what its transport has out for that */
    zs_unit_state state;
    zs_mem *slots[ZS_MAX_FLATS]; /* full buffers; borrowed from the plan's arena, as all memory here */
    zs_mem *grads[ZS_MAX_FLATS]; /* gradients that borrow */
    zs_mem *sent, *received;     /* areas of the round that is out */
    struct plan_unit *next[2];   /* by zs_phase */
    int inside, calls;
    size_t begun, oldest; /* numbers of calls */
    bool past, retired, posted, packed, over;
    bool stepped; /* in backward */
    bool has_frozen;
    int64_t n_arrived, n_expected; /* gradients */
    int bucket, out;               /* among the buckets; NONE */
    bool outstanding;
    struct plan_unit *next_out;
} plan_unit;

/* No bucket. */
enum { NONE = -1 };

typedef struct plan_bucket {
    size_t asked, bytes; /* for what it was made, and what it holds */
    plan_unit *user;
    bool posted;
    uint64_t posted_at;
} plan_bucket;

typedef struct planner {
    zs_engine *engine; /* borrowed */
    zs_plan *plan;     /* borrowed */
    plan_unit *units;  /* [engine->n] in the engine's order; owned */
    const zs_comm_ops *all, *near;
    zs_room own;          /* the transport's, without units */
    plan_bucket *buckets; /* [n_buckets] owned */
    int n_buckets;
    uint64_t posts;
    plan_unit *first_out, *last_out; /* rounds that are out, in the order of posting */
    plan_unit *latest, *last;
    bool live; /* what runs has a gradient history */
    size_t next_post;
} planner;

/* --- plan_rounds.c ----------------------------------------------------------------------------------------------------- */

/* A gradient of the unit arrives: it has a bucket from then on. */
zs_status zs_plan_pack(planner *p, plan_unit *unit);

/* Posts the unit's round; where sharing is a collective too, ends it at once. */
zs_status zs_plan_post(planner *p, plan_unit *unit);

/* (Collective transports) Posts what is packed and whose turn has come. */
zs_status zs_plan_post_due(planner *p);

/* The i-th unit to post. */
plan_unit *zs_plan_in_post_order(const planner *p, size_t i);

/* Ends all rounds, and makes all buckets idle. */
zs_status zs_plan_drain_all(planner *p);

/* What is said before a collective. */
zs_status zs_plan_talk(planner *p);

/* Gives back what the unit's gradients borrow. */
void zs_plan_return_grads(planner *p, plan_unit *unit);

#endif
