/* reader_model.h - one rank that runs the reader protocol of shm_reader.c, in steps.
 *
 * The protocol's decisions are pure functions of two words (shm_word.h), so the very functions that are compiled into
 * zshard run here, in a model in which each load and each store of shared memory is a step. What shm_reader.c does
 * around them is written once more in reader_model.c, a step per case, in the same order.
 *
 * A peer's word and its looks are loaded at once: the second may be of a later moment, but then it only makes a wait
 * longer, or ends one that the look has ended.
 *
 * Waits check one peer after the other, and do not recheck peers that were ready: the real ones need all at once, and
 * are woken by any change. Not here: writes within a pass, steps with a closure, and a second step after one backward,
 * which histories do not count (a script may have several optimizers).
 */
#ifndef READER_MODEL_H
#define READER_MODEL_H

#include "comm/shm/shm_word.h"

enum { MAX_RANKS = 3, HALF = 255 };

/* A rank's place: the access that it makes next. */
typedef enum place {
    NEXT,       /* (no access) takes the next letter */
    TELL,       /* stores its history */
    WANT,       /* stores that it wants a pass */
    ADMIT,      /* loads a peer's word: does it admit? */
    ENTER,      /* stores that it reads */
    RECHECK,    /* loads once more: is it unchanged? */
    BACK_OFF,   /* stores again that it wants */
    APART,      /* loads a peer's word: does it clash with this training forward? */
    COMPARE,    /* loads a peer's history */
    OPEN,       /* loads a peer's word: is it open to this evaluation? */
    LOOK,       /* stores that it has looked once more */
    READ,       /* loads a peer's shard */
    POST,       /* stores that its gradients are there */
    COLLECT,    /* loads whether a peer's are */
    READ_AGAIN, /* loads a peer's shard, after the rounds */
    LEAVE,      /* stores that it reads no more */
    REFUSE,     /* the same, after an error */
    LEFT,       /* loads: does a peer hold it up? */
    CATCH_UP,   /* loads a peer's word and looks: does it lag? */
    WRITE,      /* stores that it writes */
    UNREAD,     /* loads: does a peer read? */
    SCRIBBLE,   /* stores half of new values */
    SCRIBBLED,  /* stores all of them */
    WRITTEN,    /* stores its history */
    WROTE,      /* stores that it writes no more */
    MEET,       /* stores that it has reached the script's own collective */
    MET,        /* loads whether a peer has */
    GONE        /* has ended */
} place;

typedef struct rank_state {
    uint64_t word, wanted;
    uint8_t looks, work;
    uint8_t at, peer, letter;      /* place; the peer that it checks; position in its program */
    uint8_t shard, written;        /* values in its shard; those of the last known write */
    uint8_t history, told, posted; /* its own; what peers see; rounds */
    uint8_t failed, died, next_shard;
    uint8_t reductions, stepped, met;
    uint8_t kept;    /* a graph that a backward has kept */
    uint8_t wrong;   /* has read wrong values, in a pass that may still fail */
    uint8_t tainted; /* its own backward has gone wrong: its next forward must fail */
    uint8_t graph;   /* a forward has succeeded that a backward may follow */
} rank_state;

typedef struct world_state {
    rank_state rank[MAX_RANKS];
} world_state;

typedef struct program {
    const char *text[MAX_RANKS];
    bool legal; /* nothing may fail or wait for ever */
} program;

/* The number of ranks, and their programs. */
extern int model_ranks;
extern const program *model_running;

/* The letter of its program that a rank is at. */
char model_letter(const world_state *w, int me);

/* Moves a rank to another place, where it checks rank 0 first. */
void model_go(rank_state *me, place at);

/* Can rank `i` make a step? Waiting ranks cannot, unless they are interrupted. */
bool model_can_step(const world_state *w, int i);

/* The step; NULL or the promise that it breaks. `interrupt`: an interrupted forward stops waiting here. */
const char *model_step(world_state *w, int i, bool interrupt);

#endif
