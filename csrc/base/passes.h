/* passes.h - two words that the schedule and the transports share: which pass is running, and how long to wait for
 * peers. */
#ifndef ZS_PASSES_H
#define ZS_PASSES_H

/* A pass of a model. */
typedef enum zs_phase { ZS_PHASE_FORWARD, ZS_PHASE_BACKWARD } zs_phase;

/* A call's patience with its peers. (false and true mean the first two.) */
typedef enum zs_wait {
    ZS_WAIT_NOT, /* only polls */
    ZS_WAIT,     /* returns the result or an error; ZS_ERR_DIVERGED if all ranks wait for each other */
    /* like ZS_WAIT, but where all ranks wait for each other it comes back without it: one that yields can take
     * another bucket and so let the others go on */
    ZS_WAIT_OR_YIELD,
} zs_wait;

#endif
