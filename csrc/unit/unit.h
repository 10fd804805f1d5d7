/* unit.h - a unit: the parameters that are gathered and reduced together.
 *
 * A unit never replaces a parameter object. It rebinds its parameters in place: between steps to their place in this
 * rank's shard, while FULL to their place in the full buffer. Each flat (one dtype, trainable or frozen) keeps one
 * storage for either for life. Only the bytes under the full storage come and go, so views that autograd saved see them
 * again after the next gather.
 *
 * The schedule (schedule/) decides when; for it a unit is a record with a state. This file does it with memory and
 * tensors. A replicated unit (no_shard, or world size 1) has its parameters in private full memory and stays FULL; with
 * mixed precision it goes through the states like others, and a gather is a cast.
 *
 * Threads: a unit's functions run on the thread that sends its schedule events (schedule.h). Only zs_unit_retain and
 * zs_unit_release may come from any thread. The last release removes the unit from its engine, so it must not come
 * while the model runs: autograd's graph and Python's modules hold the units of a model in use.
 */
#ifndef ZS_UNIT_H
#define ZS_UNIT_H

#include "base/layout.h"
#include "base/profile.h"
#include "base/refs.h"
#include "comm/comm.h"
#include "schedule/schedule.h"
#include "shim/tensor.h"
#include "unit/disk.h"

typedef struct zs_unit zs_unit;
typedef struct zs_context zs_context;
typedef struct zs_in_backward_state zs_in_backward_state;
typedef struct zs_leaves zs_leaves;

/* State that is sharded, and for how long. */
typedef enum zs_strategy { ZS_FULL_SHARD, ZS_SHARD_GRAD_OP, ZS_NO_SHARD } zs_strategy;

/* The offloaded part of a unit; see offload.h. */
typedef struct zs_unit_offload {
    zs_disk *disk; /* counted reference; NULL: nothing */
    bool params, grads, state;
} zs_unit_offload;

/* One parameter of a unit. */
typedef struct zs_param {
    char *name;            /* dotted name in the model; owned */
    zs_tensor *tensor;     /* weak handle: the parameter's hook holds the unit, not the other way round */
    zs_tensor *grad;       /* the .grad it gets: a view of the grad shard; NULL for frozen ones; owned */
    zs_tensor *spare_grad; /* the same on the flat's spare memory; NULL if it has none; owned */
    int flat;              /* index into flats */
    int64_t offset;        /* first element in the flat's full buffer */
    int64_t numel;         /* elements, unsharded */
    int ndim;              /* dimensions, unsharded */
    int64_t *sizes;        /* [ndim] unsharded shape; owned */
    int64_t *strides;  /* [ndim] unsharded, as it came: the dimensions of a dense tensor may have any order; owned */
    zs_range owned;    /* the elements that this rank owns */
    zs_range in_shard; /* their place in the shard */
    uint32_t version;  /* version counter when the unit became FULL: finds in-place writes that would be lost */
    /* The .grad it has while gradients stay on this rank: a view of the unit's local gradients, whole; NULL if there
     * are none; owned. */
    zs_tensor *local;
    bool below;                 /* besides `local`, the grad shard holds an earlier, reduced gradient */
    uint32_t shown;             /* version of `local` when it became .grad */
    bool has_grad;              /* its grad shard holds a gradient (set aside, or reduced in this backward) */
    bool reduced;               /* a new gradient was reduced in this backward */
    uint64_t loaded, loaded_in; /* digest and number of its last load; see history.h */
    bool watched;               /* a script took its `.data` while it was unsharded; see zs_unit_watch */
    uint64_t content;           /* (watched) a digest of its elements at that time */
    bool held;                  /* it had a gradient when this backward began, to which the new one is added */
    bool removed;               /* removed from its module: counts as frozen */
    bool squared;               /* its gradient counts in the flat's `squares` */
    uint32_t squared_version;   /* version of `grad` then */
    bool chosen;                /* see reduce/chosen.h */
    bool nonfinite;             /* this rank's share of its last sum, if squares were taken, was infinite or NaN */
    uint64_t nonfinite_on;      /* ... and that of these ranks' own gradients, of the first 64: a bitmap */
} zs_param;

/* Parameters of one dtype, all trainable or all frozen. With mixed precision the compute dtype differs: then `low` has
 * this rank's shard in the compute dtype, cast for each forward, and the full buffer has that dtype. */
typedef struct zs_flat {
    zs_dtype dtype;                 /* of the parameters at rest, their gradients and the optimizer's state */
    zs_dtype compute;               /* of the full buffer, in forward and backward */
    zs_dtype wire;                  /* of gradients on their way */
    zs_wire code;                   /* how parameters travel between hosts, unless they are gathered `exact` */
    size_t compute_size, wire_size; /* bytes per element */
    bool trainable;
    bool thawed;    /* unfrozen after wrapping */
    bool reordered; /* some are not row-major unsharded; shards and gathered bytes are */
    zs_layout layout;
    zs_flat_mem mem;         /* shard, and full if the transport maps it; unused in units that are always unsharded */
    zs_flat_mem low;         /* the same in `compute`, if that is another dtype; unused in replicated units */
    zs_flat_mem secondary;   /* the secondary shard, gathered from instead; see secondary.c */
    bool spoiled;            /* `secondary` is invalid */
    zs_mem *full_mem;        /* bytes under the full storage now: mapped, private or a slot; NULL while sharded */
    zs_gathering *gathering; /* the gather in flight; owned */
    zs_storage *full;        /* owned */
    zs_storage *shard;       /* of parameters at rest; owned; NULL if they are always unsharded */
    zs_mem *grad_mem;        /* grad shard (full gradient if replicated); NULL if frozen; owned reference */
    zs_storage *grads;       /* storage on grad_mem; owned */
    zs_exact *squares;       /* of this rank's gradients, see reduce/squares.h; owned; NULL: never asked for */
    bool squared;            /* it is that of the gradients that are there now, if these have kept their versions */
    int squares_halvings;    /* the gradients' factor is 2^-squares_halvings, as long as `squares` holds; -1: another */
    int squares_due;         /* backwards for which it is computed yet */
    zs_mem *spare_mem;       /* alternates with grad_mem, see kept_grads.h; NULL: none; owned reference */
    zs_storage *spare_grads; /* storage on spare_mem; owned */
    int trainable_index;     /* its index among the trainable flats */
    size_t wire_shard_bytes; /* bytes of one rank's shard in the bucket; 0 if frozen */
    size_t bucket_offset;    /* where this flat begins in the bucket */
    size_t local_offset;     /* ... and in the unit's local gradients */
    zs_storage *local;       /* storage on the unit's local gradients; NULL without them; owned */
    char *in_use;            /* (on disk) memory that the pager keeps resident; NULL: none; borrowed */
    size_t in_use_bytes;
} zs_flat;

/* Bytes of a flat's gradients in a bucket. */
static inline size_t zs_flat_wire_bytes(const zs_flat *flat)
{
    return (size_t)zs_layout_full_numel(&flat->layout) * flat->wire_size;
}

/* Bytes of this rank's shard in the compute dtype. */
static inline size_t zs_flat_low_bytes(const zs_flat *flat)
{
    return (size_t)flat->layout.shard_numel * flat->compute_size;
}

/* The memory of this rank's parameters at rest. */
static inline char *zs_flat_home(const zs_flat *flat)
{
    return flat->mem.shard != NULL ? flat->mem.shard : flat->full_mem->ptr;
}

struct zs_unit {
    zs_record record;      /* the schedule's; first */
    zs_refs refs;          /* counted references */
    zs_context *context;   /* counted reference to its engine; changes when an outer FSDP() takes the unit over */
    char *name;            /* owned */
    char *sharded_message; /* the error of an access to a resharded full buffer; owned */
    zs_strategy strategy;
    bool exact;              /* the full buffer, or the next one, has the parameters' own dtype: a script reads them */
    bool written_in_forward; /* a script has written to its shards since this forward last gathered it */
    zs_unit_offload offloads;
    int shard;        /* which shard of each flat this rank holds, or if replicated, sums */
    zs_wire code;     /* how its gradients travel between hosts */
    double divisor;   /* of sums of gradients; 0: the number of ranks */
    bool in_backward; /* this backward has reached it: its gradients are set aside */
    bool gone; /* its module was freed; references to parameters keep the unit alive, on each rank for its own time */
    zs_param *params; /* [n_params]; owned */
    int64_t n_params;
    size_t planned_at; /* its place among the units of the last plan that has it; see dry.h */
    zs_flat flats[ZS_MAX_FLATS];
    int n_flats;
    zs_cunit *cunit; /* NULL if nothing is ever reduced */
    /* Bitmaps of parameters, in one piece of memory that the first owns: */
    uint64_t *used;                 /* packed in this round */
    uint64_t *arrived;              /* those of them that came in this backward */
    uint64_t *kept;                 /* (replicated) whose .grad has not been reduced since */
    zs_mem *local;                  /* unreduced gradients of earlier backwards, see reduce/local_grads.h; NULL: none */
    zs_leaves *leaves;              /* see reduce/leaves.h; NULL: none yet; owned */
    zs_mem *leaf;                   /* of a micro-batch that is not its step's last; NULL: none; owned reference */
    bool grads_held;                /* its gradients have memory that was written */
    int64_t grads_shown;            /* how many .grad were set when its last backward ended */
    zs_in_backward_state *stepping; /* its step in backward; NULL: none; owned; see in_backward.h */
    bool reshard_by_hand;           /* users have set whether it reshards after forward */
    size_t shown_grads;             /* bytes of gradients that a trace has shown, see engine/usage.h */
    bool mixed;      /* (replicated) a failed backward posted gradients: timing decides if .grad has the mean */
    bool borrows;    /* (stepped in backward) its gradients have memory only from the sum to the step */
    void *py_owner;  /* updates the parameters' Python classes; NULL: none; borrowed; see zs_unit_set_py_owner */
    bool bound_full; /* (with an owner) the parameters' class is to be that of the full buffer */
    bool shown_full; /* (with an owner) it is */
};

/* The unit of a schedule's record. */
static inline zs_unit *zs_unit_of(zs_record *record)
{
    return (zs_unit *)record;
}

/* Words of a bitmap of its parameters. */
static inline size_t zs_unit_bitmap_words(const zs_unit *unit)
{
    return ((size_t)unit->n_params + 63) / 64;
}

/* Does the full buffer, or the next one, have another dtype than the parameters at rest? */
static inline bool zs_flat_is_lowered(const zs_unit *unit, const zs_flat *flat)
{
    return !unit->exact && flat->compute != flat->dtype;
}

/* The code of that full buffer between hosts. */
static inline zs_wire zs_flat_code(const zs_unit *unit, const zs_flat *flat)
{
    return unit->exact ? ZS_WIRE_EXACT : flat->code;
}

/* Does the unit compute with other values than its parameters': in another dtype, or decoded from a wire code? */
static inline bool zs_unit_is_mixed(const zs_unit *unit)
{
    for (int f = 0; f < unit->n_flats; f++)
        if (unit->flats[f].compute != unit->flats[f].dtype || unit->flats[f].code != ZS_WIRE_EXACT) return true;
    return false;
}

/* The source of that full buffer's gather. */
static inline const zs_flat_mem *zs_flat_source(const zs_unit *unit, const zs_flat *flat)
{
    bool lowered = zs_flat_is_lowered(unit, flat);
    if (flat->secondary.mem != NULL && lowered == (flat->compute != flat->dtype)) return &flat->secondary;
    return lowered ? &flat->low : &flat->mem;
}

/* Bytes of a flat's full buffer, in its parameters' own dtype (`exact`) or in the compute dtype. */
static inline size_t zs_flat_full_bytes_as(const zs_flat *flat, bool exact)
{
    return (size_t)zs_layout_full_numel(&flat->layout) * (exact ? flat->layout.itemsize : flat->compute_size);
}

/* Bytes of its full buffer now. */
static inline size_t zs_flat_full_bytes(const zs_unit *unit, const zs_flat *flat)
{
    return zs_flat_full_bytes_as(flat, unit->exact);
}

/* Bytes of this rank's part of the flat's parameters at rest; its gradients take the same. */
static inline size_t zs_flat_own_bytes(const zs_unit *unit, const zs_flat *flat)
{
    return unit->record.is.replicated ? zs_layout_full_bytes(&flat->layout) : zs_layout_shard_bytes(&flat->layout);
}

/* Mixed precision; ZS_BYTES: the parameters' own dtype. */
typedef struct zs_precision {
    zs_dtype compute; /* of parameters in forward and backward */
    zs_dtype wire;    /* of gradients on their way; the default is `compute` */
} zs_precision;

typedef struct zs_unit_spec {
    const char *name; /* dotted name of the module, "" for the root; copied */
    zs_strategy strategy;
    int64_t n_params;
    const char *const *names;  /* [n_params] dotted names in the model; copied */
    zs_tensor *const *tensors; /* [n_params] strong handles; borrowed */
    zs_precision precision;    /* of its floating-point parameters */
    const bool *keep;          /* [n_params] those that keep their own dtype; NULL: none */
    /* Only the sizes of such a unit: it gets no memory, and the parameters (which may be on the meta device) stay as
     * they are. */
    bool dry_run;
} zs_unit_spec;

/* Checks whether a unit can be created: fails as zs_unit_new does, and changes nothing. */
zs_status zs_unit_check(const zs_unit_spec *spec);

/* New unit of a model (in engine/unit_life.c; `context` is an engine's): allocates flats and shards, copies this rank's
 * shard of each parameter, and rebinds the parameters. All ranks create the same units in the same order. ZS_ERR_VALUE,
 * naming the parameter, for those that cannot be sharded (another device, meta, sparse); the parameters are then
 * unchanged. */
zs_status zs_unit_new(zs_context *context, const zs_unit_spec *spec, zs_unit **out);

/* Has a parameter of a frozen flat been unfrozen? Frozen flats are not reduced. */
bool zs_unit_is_thawing(const zs_unit *unit);

/* (Between passes, on all ranks) Reduces the gradients of such flats from now on: gives them memory and a place in the
 * bucket. Parameters stay where they are. ZS_ERR_STATE with unreduced gradients, or if the unit is stepped in backward.
 */
zs_status zs_unit_thaw(zs_unit *unit);

/* Adds / drops a reference (the last drop frees). The signatures fit zs_hook. */
void zs_unit_retain(void *unit);
void zs_unit_release(void *unit);

/* Sets how long the unit stays unsharded: FULL_SHARD or SHARD_GRAD_OP, for a unit created as one of them. */
void zs_unit_set_strategy(zs_unit *unit, zs_strategy strategy);

/* Renames the unit and its parameters, as in an outer model. */
zs_status zs_unit_rename(zs_unit *unit, const char *name);

/* Are the parameters unsharded now? */
static inline bool zs_unit_is_full(const zs_unit *unit)
{
    return zs_record_is_full(&unit->record);
}

/* The schedule's actions of these names, on a unit. */
zs_status zs_unit_gather(zs_unit *unit);
zs_status zs_unit_bind(zs_unit *unit);
zs_status zs_unit_cancel(zs_record *record);
zs_status zs_unit_reshard(zs_unit *unit);

/* A script is about to take the `.data` of parameter `i`; writes to it are invisible. If the unit is FULL: moves the
 * parameter's elements to private memory, where no peer sees a write, and keeps a digest, which zs_unit_reshard
 * compares. */
zs_status zs_unit_watch(zs_unit *unit, int64_t i);

/* Sets the Python object that updates the classes of this unit's parameters, which are sharded now; NULL clears it. */
void zs_unit_set_py_owner(zs_unit *unit, void *py_owner);

/* (With an owner) Sets whether Python sees the parameters as unsharded, as in the unit's own forward. */
void zs_unit_show_full(zs_unit *unit, bool full);

/* Are the parameters' Python classes up to date? */
static inline bool zs_unit_class_is_current(const zs_unit *unit)
{
    return unit->bound_full == unit->shown_full;
}

/* Notes that they are. */
void zs_unit_note_class(zs_unit *unit);

/* Sets the dtype of the next gather: the parameters' own (`exact`), or the compute dtype. */
void zs_unit_set_exact(zs_unit *unit, bool exact);

/* (Pinned) Moves the unsharded parameters to a private copy, if they are views of peers' shards. */
zs_status zs_unit_copy_full(zs_unit *unit);

/* (Pinned) Accepts writes to that copy; `keep`: this rank's shard of it is kept. Outside of sessions, before it is
 * resharded. No-op for a unit that is not pinned. */
zs_status zs_unit_accept(zs_unit *unit, bool keep);

/* (Mixed precision) Casts this rank's shards to the compute dtype. Call where no peer reads. */
zs_status zs_unit_cast(const zs_unit *unit);

/* Does zs_unit_cast do anything? */
bool zs_unit_has_casts(const zs_unit *unit);

/* Have scripts moved parameters to other memory (`p.data = t`, load_state_dict(assign=True), .to())? */
bool zs_unit_is_moved(const zs_unit *unit);

/* Copies moved parameters back, or fails with ZS_ERR_VALUE naming the parameter. Call where no peer reads. */
zs_status zs_unit_write_back(zs_unit *unit);

/* Binds one parameter to its memory at rest. */
zs_status zs_unit_bind_local(zs_unit *unit, zs_param *param);

/* Copies the full parameter `i` to `dst` (row-major), in memory of `where`: its device or the host. The unit must be
 * FULL. */
zs_status zs_unit_read_param(const zs_unit *unit, int64_t i, void *dst, zs_where where);

/* The error of an access to the resharded full buffer of the unit `name`; new, NULL if out of memory. */
char *zs_unit_message(const char *name);

/* Begins a profiler range "zshard::WHAT (UNIT)"; new, see base/profile.h. */
zs_profile *zs_unit_profile(const zs_unit *unit, const char *what);

/* Bytes of: this rank's parameters at rest, with casts; the full buffer; the bucket. */
size_t zs_unit_shard_bytes(const zs_unit *unit);
size_t zs_unit_full_bytes(const zs_unit *unit);
size_t zs_unit_bucket_bytes(const zs_unit *unit);

/* Bytes of one gradient in the bucket, which has several in some cases (base/tree.h). */
size_t zs_unit_section_bytes(const zs_unit *unit);

/* Bytes of its local gradients, while it has some. */
size_t zs_unit_local_bytes(const zs_unit *unit);

/* Bytes of the secondary shard. */
size_t zs_unit_secondary_bytes(const zs_unit *unit);

/* Do the unit's gradients leave autograd's memory? With world size 1 they stay there, unless they have to be cast. */
bool zs_unit_reduces(const zs_unit *unit);

/* The transport's description of the unit's gradients. */
zs_cunit_spec zs_unit_round_spec(const zs_unit *unit);

/* Bytes of this rank's gradients after a backward. */
size_t zs_unit_grad_bytes(const zs_unit *unit);

/* Bytes of gradients that the unit holds in memory now, except in a slot: also of local ones of a unit whose others are
 * offloaded. */
size_t zs_unit_held_grad_bytes(const zs_unit *unit);

/* --- moved.c ------------------------------------------------------------------------------------------------------ */

/* Returns the failure of a parameter that was moved `when` it must not be. */
zs_status zs_moved_error(const zs_unit *unit, const zs_param *param, const char *when);

/* --- pinned.c ----------------------------------------------------------------------------------------------------- */

/* Counts one more pinned unit. */
void zs_pinned_begin(void);

/* The unit stops being pinned: for zs_unit_reshard, before the schedule clears record.pinned, and for freeing it. No-op
 * if it is not pinned. */
void zs_pinned_end(const zs_unit *unit);

/* Bytes of the copy, if it lies in no slot. */
size_t zs_pinned_bytes(const zs_unit *unit);

/* Is any unit of this process pinned? From any thread. */
bool zs_pinned_any(void);

/* --- secondary.c -------------------------------------------------------------------------------------------------- */

/* Allocates the flat's copy, without values, if its engine keeps one. */
zs_status zs_secondary_new(zs_unit *unit, zs_flat *flat);

/* Renews the copies of those flats whose shard has changed on any rank of the replica group. Collective there; call
 * where no peer reads. A failure invalidates the copies, and the next call renews them. */
zs_status zs_secondary_refresh(zs_comm *replica_group, zs_record *const *records, size_t n);

/* Fills `slot` with the full parameters in their own dtype, where the copy has another. Collective over all ranks. */
zs_status zs_secondary_gather_exact(zs_unit *unit, const zs_flat *flat, zs_mem *slot);

/* Invalidates the unit's copies, after another write than a refresh. */
void zs_secondary_spoil(zs_unit *unit);

/* --- unit_memory.c ------------------------------------------------------------------------------------------------ */

/* Decides where each parameter lies in its flat, and each gradient in a bucket. */
zs_status zs_unit_lay_out(zs_unit *unit);

/* Allocates that memory, zeroed: shards, or full memory where parameters are always unsharded; gradient shards and the
 * views of them; the transport's record. */
zs_status zs_unit_take_memory(zs_unit *unit);

/* Copies this rank's shard of each parameter into that memory. */
zs_status zs_unit_take_values(zs_unit *unit);

/* New view of a parameter's gradient, on memory with the layout of its flat's gradient shard. */
zs_status zs_unit_new_grad_view(const zs_unit *unit, const zs_param *param, const zs_storage *storage, zs_tensor **out);

#endif
