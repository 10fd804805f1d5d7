/* optim.h - one optimizer step over a group of parameters in one call.
 *
 * A plan keeps handles to the parameters and their state tensors. At each step it looks up the current places of these
 * and of gradients, joins adjacent memory into runs, and sends the threads over all runs at once, cut by elements and
 * not by parameters. Looking changes nothing; a step writes only after all checks have passed.
 */
#ifndef ZS_OPTIM_H
#define ZS_OPTIM_H

#include "device/device.h"
#include "shim/tensor.h"
#include "update/jobs.h"

/* --- plan --------------------------------------------------------------------------------------------------------- */

typedef struct zs_optim zs_optim;

/* A parameter and its state; all handles owned. Without state, `state` and `step` are NULL. */
typedef struct zs_member {
    zs_tensor *param;
    zs_tensor *state[ZS_OPTIM_STATES];
    zs_tensor *step; /* Adam: one float32 or float64, the number of steps done */
    bool first;      /* SGD: momentum_buffer is new; its first value is the gradient */
    int64_t numel;   /* elements it had when it was added; set by zs_optim_add */
    double steps;    /* Adam, capturable: the number of steps in `step`, which the plan must not read */
    bool step_wide;  /* `step` is of float64; set by zs_optim_add */
    int64_t number;  /* dithered and compact steps: the number of its first element among all that the optimizer has on
                      * all ranks; -1: not known */
} zs_member;

/* A step's action on a member. */
typedef enum zs_verdict {
    ZS_MEMBER_IDLE,  /* has no gradient: left alone */
    ZS_MEMBER_TAKEN, /* updated */
    /* could be taken but lacks state that the rule needs, or its number: make a new plan with it */
    ZS_MEMBER_STATELESS,
    ZS_MEMBER_FOREIGN, /* not plain dense CPU memory of one floating dtype: the caller must update it */
} zs_verdict;

/* New plan for at most `capacity` members. `compact`: state is in 8 bits or in float32, as each member's tensors are;
 * members are float32 or bfloat16, and their numbers begin groups of ZS_GROUP elements. */
zs_status zs_optim_new(zs_rule rule, bool compact, int64_t capacity, zs_optim **out);

/* Frees the plan and its members' handles; NULL allowed. */
void zs_optim_free(zs_optim *plan);

/* Appends a member, whose handles the plan takes. Members beyond the capacity are a bug of the caller. */
void zs_optim_add(zs_optim *plan, const zs_member *member);

/* Looks at all members, without changing any, and prepares the step. ZS_ERR_TORCH where a tensor has no bytes;
 * ZS_ERR_UNSUPPORTED if the step is dithered, and a member of half precision cannot be, or if it is compact, and a
 * member is FOREIGN. `live`: NULL, or the step is
 * capturable: members' counters are on their device, and nothing is read there by the host; ZS_ERR_UNSUPPORTED for a
 * member that is FOREIGN or on the CPU. Both are borrowed until the step is done. */
zs_status zs_optim_prepare(zs_optim *plan, const zs_hyper *hyper, const zs_live *live);

/* Verdict of zs_optim_prepare on member `index`. */
zs_verdict zs_optim_verdict(const zs_optim *plan, int64_t index);

/* Does the step for all members that were found TAKEN: counts `step`, updates, raises the parameters' versions. Only
 * after zs_optim_prepare, with nothing in between. Needs no GIL. Can fail only where memory lies on a disk
 * (ZS_ERR_SYSTEM), and then half-way. */
zs_status zs_optim_step(zs_optim *plan);

/* zs_optim_step without the update: counts `step`, raises the parameters' versions. */
void zs_optim_count(zs_optim *plan);

/* Looks at all members once more, with the hyperparameters of zs_optim_prepare: gradients may have been multiplied
 * since by a pending factor. ZS_ERR_STATE if they have changed otherwise. */
zs_status zs_optim_look_again(zs_optim *plan);

/* The update of the prepared runs of the host, and how many they are. Borrowed: until the plan is prepared again.
 * ZS_ERR_UNSUPPORTED where that is not all: runs lie on a GPU or, some of their memory, on a disk. */
zs_status zs_optim_job(const zs_optim *plan, zs_update_job *out);

/* Whose memory a tensor, described by `info`, lies in; NULL: of a kind that has no loops here. ZS_ERR_CUDA where its
 * GPU cannot be used. */
zs_status zs_optim_device_of(const zs_tensor *tensor, const zs_tensor_info *info, const zs_device **out);

/* --- loops (optim_cpu.c, optim_compact.c, optim_lanes.c) ---------------------------------------------------------- */

/* Updates the elements [begin, end) of a run. If dithered, their numbers must have the same upper half. */
typedef void zs_run_loop(const zs_run *run, int64_t begin, int64_t end);

/* The loop for this run (of any dtype but ZS_BYTES) on this machine. `full`: Adam with amsgrad, SGD with momentum. */
zs_run_loop *zs_run_loop_for(zs_rule rule, bool full, const zs_run *run);

/* The same for a run of float32 or bfloat16 whose form is not PLAIN. `begin` begins a group. */
zs_run_loop *zs_compact_loop_for(zs_rule rule, bool full, const zs_run *run);

/* Steps the whole blocks of groups in [begin, end) by AdamW, where this machine has vectors for it (optim_lanes.c).
 * Returns where it stopped; the rest is left to the caller. */
int64_t zs_adam_blocks(const zs_run *run, int64_t begin, int64_t end);

/* Updates elements [from, to) of the run by its `loop`; `from` begins a group. If the run is dithered, cuts the range
 * where the upper half of the elements' numbers changes. */
void zs_update_range(zs_run_loop *loop, const zs_run *run, int64_t from, int64_t to);

/* Elements below which another thread costs more than it helps (some 30 us of memory traffic). */
enum { ZS_UPDATE_GRAIN = 1 << 15 };

/* A thread's share of the work, nominally elements [begin, end) of a run. Neighboring ranges are divided at the nearest
 * boundary that suits the loops; both ends may lie outside of the run. */
void zs_update_part(const zs_update_job *job, int64_t begin, int64_t end);

/* Updates a run, some of whose memory lies on a disk: piece by piece, each borrowed from the pager (zs_pager_lend).
 * ZS_ERR_SYSTEM where the disk fails, and then half-way. */
zs_status zs_update_on_disk(const zs_update_job *job);

#endif
