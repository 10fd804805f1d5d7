/* dry.h - the schedule's other executor: it knows how large things are, and does none of them.
 *
 * An action that would borrow memory borrows its size, from an arena without memory.
 */
#ifndef ZS_DRY_H
#define ZS_DRY_H

#include "unit/context.h"
#include "unit/unit.h"

typedef struct zs_dry zs_dry;

/* Acts of a step. The first two are the script's, the others are the schedule's. */
typedef enum zs_dry_act {
    ZS_DRY_FORWARD,  /* the forward reaches a call of the plan */
    ZS_DRY_BACKWARD, /* the backward reaches it */
    ZS_DRY_GATHER,   /* a gather starts */
    ZS_DRY_BIND,     /* its result is waited for */
    ZS_DRY_POST,     /* a unit's gradients are handed over */
    ZS_DRY_SUM,      /* their sum is waited for */
    ZS_DRY_REUSE,    /* their bucket is needed again: it is waited for until all peers have read it */
    ZS_DRY_STEP,     /* the unit is stepped */
} zs_dry_act;

typedef struct zs_dry_event {
    zs_dry_act act;
    size_t at; /* the call, or the unit's place in the model's order */
} zs_dry_event;

/* The acts of a dry run, in the order in which they begin. */
typedef struct zs_dry_events {
    zs_dry_event *list; /* [n] owned */
    size_t n, room;
} zs_dry_events;

/* A unit in a dry run. */
typedef struct zs_dry_unit {
    zs_record record;
    zs_dry *dry;                 /* borrowed, as all memory here is from its arenas */
    const zs_unit *unit;         /* with these sizes */
    zs_room room;                /* the transport's memory for its rounds */
    bool lends;                  /* its gradients have memory only from the sum to the step */
    int64_t n_wanted;            /* the number of gradients */
    bool has_frozen;             /* some parameters are frozen */
    bool prepared;               /* in this backward */
    zs_mem *slots[ZS_MAX_FLATS]; /* full buffers */
    zs_mem *codes[ZS_MAX_FLATS]; /* areas of gathers in flight */
    zs_mem *grads[ZS_MAX_FLATS];
    zs_mem *sent, *received; /* areas of the posted round */
} zs_dry_unit;

/* A dry run. */
struct zs_dry {
    zs_schedule schedule;
    const zs_context *context; /* borrowed */
    zs_room own;               /* the transport's, without units */
    zs_dry_unit *units;        /* [schedule.n] in the model's order; owned */
    zs_arena *slots;           /* owned, as */
    zs_arena *areas;
    zs_dry_events *events; /* borrowed; NULL: not kept */
};

/* Begins a dry run of `n` units. Free it with zs_dry_free, also after a failure. */
zs_status zs_dry_begin(zs_dry *dry, const zs_context *context, zs_unit *const *units, size_t n);

/* Makes the i-th unit be stepped in backward, with borrowed memory for its gradients. */
void zs_dry_step_early(zs_dry *dry, size_t i);

/* Adds an event, if events are kept. */
zs_status zs_dry_note(zs_dry *dry, zs_dry_act act, size_t at);

/* The peak of borrowed bytes: slots, areas, buckets. */
size_t zs_dry_bytes(const zs_dry *dry);

/* Frees a dry run. */
void zs_dry_free(zs_dry *dry);

#endif
