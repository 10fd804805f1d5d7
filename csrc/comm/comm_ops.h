/* comm_ops.h - a transport's tables of functions, and the calls that reach them. See comm.h.
 *
 * Four small tables, for flats, rounds, readers and small messages, so that transports can share tables. Outside comm/,
 * use only the calls below, which handle missing functions. */
#ifndef ZS_COMM_OPS_H
#define ZS_COMM_OPS_H

#include "comm/comm_types.h"
#include "comm/fingerprint.h"
#include "comm/round.h"

#include <stdatomic.h>

/* --- the tables --------------------------------------------------------------------------------------------------- */

/* The number of kinds of numbered objects, at most. */
enum { ZS_NUMBERS = 3 };

/* Flats, and gathering them. */
typedef struct zs_flat_ops {
    /* Allocates `shard_bytes` per rank. Same calls in the same order on all ranks, but not a barrier: a peer's shard
     * may be read only inside a reader session (or after an exchange). */
    zs_status (*flat_new)(zs_comm *, size_t shard_bytes, zs_flat_mem *out);
    /* Frees the memory (peers' mappings of it stay valid, their content does not). */
    void (*flat_free)(zs_comm *, zs_flat_mem *);
    /* *new* zeroed memory for full buffers, to gather into. The same calls in the same order on all ranks. NULL:
     * uses the device's memory. */
    zs_status (*slot_new)(zs_comm *, size_t bytes, zs_mem **out);
    /* (not mapped) Starts to fill `to` from all ranks' shards, which must not change until gather_finish.
     * Collective, in the same order on all ranks; `unit` is the name of the flat's unit, for messages. The flat may
     * belong to another comm of this transport. */
    zs_status (*gather_start)(zs_comm *, const zs_flat_mem *, const char *unit, zs_target to, zs_gathering **out);
    /* (not mapped) Waits for it, and frees it even if it failed. Any order. */
    zs_status (*gather_finish)(zs_comm *, zs_gathering *);
    /* Numbers of objects created so far, of each kind that all ranks create in the same order, such as flats:
     * [ZS_NUMBERS]. NULL: none. */
    void (*numbers)(const zs_comm *, uint64_t *out);
    /* Continues from these numbers; none is lower than this rank's own. */
    void (*continue_from)(zs_comm *, const uint64_t *numbers);
} zs_flat_ops;

/* Reducing: what round.c needs of a transport. Functions must exist unless NULL is mentioned. */
typedef struct zs_round_ops {
    /* Allocates at least `bytes`; on shm peers map it by its key when they first collect from it. */
    zs_status (*bucket_new)(zs_comm *, size_t bytes, zs_bucket *out);
    void (*bucket_free)(zs_comm *, zs_bucket *);
    /* The capacity of a bucket for `bytes`. */
    size_t (*bucket_room)(size_t bytes);
    /* --- units ---------------------------------------------------------------------------------------------------- */
    size_t unit_bytes; /* of the transport's own struct, which begins with a zs_cunit; 0: it has none */
    /* Initializes what follows the head; unit_clear is called even if this fails. Both may be NULL. */
    zs_status (*unit_init)(zs_comm *, zs_cunit *);
    void (*unit_clear)(zs_comm *, zs_cunit *);
    /* The name in its spec has changed; NULL: nothing else keeps it. */
    void (*renamed)(zs_comm *, zs_cunit *);
    /* --- a round, in this order; NULL: nothing to do or to wait for ----------------------------------------------- */
    /* May rounds be posted and collected? */
    zs_status (*usable)(zs_comm *);
    /* Sends the header and the bucket, if any. */
    zs_status (*send)(zs_comm *, zs_cunit *);
    /* Has the send begun? If it failed, zs_cunit_undo_post has undone the post. */
    zs_status (*begun)(zs_comm *, zs_cunit *, zs_wait wait, bool *done);
    /* Sets `data` and `headers` once all ranks' have arrived. *ready is set before. */
    zs_status (*arrive)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    /* (ZS_REDUCE_ALL) This rank's sum is in the bucket. If rounds are collectives, this gathers all sums there; else
     * it informs the peers. */
    zs_status (*share)(zs_comm *, zs_cunit *);
    /* Completes once all ranks have shared. *ready is set before. */
    zs_status (*arrive_shared)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    zs_status (*release)(zs_comm *, zs_cunit *);
    /* Frees a round's memory: after release, or a failure. */
    void (*drop)(zs_comm *, zs_cunit *);
    /* Waits for outstanding work when the unit is freed. */
    void (*finish)(zs_comm *, zs_cunit *);
    /* Has every peer released the bucket? *ready is preset for transports whose peers have copies. */
    zs_status (*reusable)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    /* --- besides -------------------------------------------------------------------------------------------------- */
    /* (between rounds) Gradients are multiplied by `factor` from now on, and so must what codes have lost. NULL:
     * all is exact. */
    void (*rescale)(zs_comm *, zs_cunit *, double factor);
    /* Reports that this rank will not finish its backward: the peers' next collective fails with ZS_ERR_DIVERGED and
     * sets `heard`; here it succeeds. Rounds posted before can still be collected. Collective. NULL where shards are
     * mapped: a flag of an empty post reports it. */
    zs_status (*give_up)(zs_comm *);
    /* The transport's memory for a unit of `spec`, or (NULL) without units. */
    zs_room (*room)(const zs_comm *, const zs_cunit_spec *spec);
    /* Allocates what rounds will have out at a time, according to a plan; NULL: nothing. */
    zs_status (*reserve)(zs_comm *, const zs_arena *plan);
} zs_round_ops;

/* Reads of the peers' shards. */
typedef struct zs_reader_ops {
    /* One per model (root), same order on all ranks. Counts reductions, and forwards of each kind since the last
     * one. */
    zs_status (*reader_new)(zs_comm *, const char *name, zs_reader **out);
    void (*reader_free)(zs_comm *, zs_reader *);
    /* Counts a forward; then waits until every owner has begun that forward as well, or is in a state in which this
     * rank may read alone, and marks this rank as reading. A backward: the same without counting. ZS_ERR_DIVERGED if
     * ranks do not run the same forward and some have changed their parameters by hand. */
    zs_status (*read_begin)(zs_comm *, zs_reader *, const zs_reading *);
    /* Marks this rank as not reading, and returns once no peer reads its shards. A backward: also counts one
     * reduction; call it when all its rounds are released. */
    zs_status (*read_end)(zs_comm *, zs_reader *, zs_phase);
    /* This rank is about to write its shards: returns once no peer reads them; none will until write_end. A pass
     * that begins ends a write. No-op within a pass. Both NULL where shards are not mapped. */
    zs_status (*write_begin)(zs_comm *, zs_reader *);
    /* `known`: the write is complete and collective. Else no rank evaluates with these shards before the next such
     * write or pass; such a call is allowed at any time. */
    void (*write_end)(zs_comm *, zs_reader *, bool known);
    /* Parameters that scripts wrote by hand are complete and the same on all ranks; `changed` as in zs_reading. NULL
     * as above. */
    void (*write_complete)(zs_comm *, zs_reader *, bool changed);
    /* All ranks have reached a collective of the script: resets the look counts. NULL as above. */
    void (*meet)(zs_comm *, zs_reader *);
    /* See zs_comm_publish_fingerprint; NULL: the head keeps it. */
    void (*publish_fingerprint)(zs_comm *, zs_reader *, const zs_fingerprint *now);
} zs_reader_ops;

/* Small messages between ranks. */
typedef struct zs_talk_ops {
    /* Small all-gather: `bytes` (<= 4096) from each rank into all[world*bytes]; a barrier. Same order on all ranks. */
    zs_status (*exchange)(zs_comm *, const void *mine, size_t bytes, void *all);
    /* Broadcasts `data` of `root`; host memory. */
    zs_status (*broadcast)(zs_comm *, void *data, size_t bytes, int root);
    /* The same for device memory, in the compute stream; NULL if that is host memory. */
    zs_status (*broadcast_device)(zs_comm *, void *data, size_t bytes, int root);
    /* As exchange, for device memory of any size, in the compute stream; waits for the peers' hosts. NULL if nothing
     * queues. */
    zs_status (*gather_device)(zs_comm *, const void *mine, size_t bytes, void *all);
    /* See zs_comm_publish; NULL: the head keeps it. */
    void (*publish)(zs_comm *, zs_topic, const char *);
    /* The latest text that a peer has published on a topic; NULL, like a NULL function: unknown. */
    const char *(*published)(const zs_comm *, int rank, zs_topic);
    /* Sets texts [world] to the places of the ranks' scripts, after asking ranks without a recent report; waits at most
     * a second. False, as NULL: ranks cannot be asked. / Has a peer asked? / Answers. Any thread. */
    bool (*locate)(zs_comm *, char (*texts)[ZS_WHERE]);
    bool (*asked)(const zs_comm *);
    void (*answer)(zs_comm *, const char *text);
    /* Has a rank reported that it cannot continue, while all ranks are still running? NULL: no. */
    bool (*is_stopped)(const zs_comm *);
    /* Waits at most `seconds` for the processes of ranks that have left to exit. NULL: none is known to have left. */
    void (*outlive)(zs_comm *, double seconds);
    /* See zs_comm_end: sends the peers `comm->fingerprint` and texts. Once all ranks have, sets *all and their
     * `fingerprints` [world]. NULL: nothing is known. */
    zs_status (*end)(zs_comm *, zs_fingerprint *fingerprints, bool *all);
    /* Idempotent. Reports that this rank cannot continue, and why; the peers' waits fail at once with that text. */
    void (*abort)(zs_comm *, const char *reason);
    /* Fails with a peer's reason if it has reported one by abort, even if it has exited since. NULL: ZS_OK. */
    zs_status (*check_peers)(zs_comm *);
} zs_talk_ops;

/* Memory of this rank that its peers can read, for optimizer state. */
typedef struct zs_state_ops {
    /* *new* zeroed memory. Its pages go back when it is freed, but not once the comm is closed. */
    zs_status (*state_new)(zs_comm *, size_t bytes, zs_mem **out);
    /* The offset of that memory, as peers address it; false: it is other memory. */
    bool (*state_offset)(const zs_comm *, const zs_mem *, uint64_t *offset);
    /* Replaces the text that peers read. One thread. */
    zs_status (*post)(zs_comm *, const void *text, size_t bytes);
    /* The last post of rank `rank`: *new*, for free(). Any time, also after it has exited. */
    zs_status (*posted)(zs_comm *, int rank, char **text, size_t *bytes);
    /* Has rank `rank` closed its comm, so that it no longer reads? */
    bool (*left)(const zs_comm *, int rank);
    /* Copies memory of rank `rank`. */
    zs_status (*read)(zs_comm *, int rank, uint64_t offset, void *to, size_t bytes);
} zs_state_ops;

/* A kind of transport. */
typedef struct zs_comm_ops {
    const char *name;         /* as in transport=: "self", "shm", "hosts", "c10d", ... */
    size_t shard_align;       /* shard_bytes of flats must be a multiple of this */
    bool mapped;              /* flats come with `full` */
    bool shares_slots;        /* the ranks of a host share a slot's memory */
    zs_stream stream;         /* (on devices that queue) the stream in which results of collect() may be read */
    const zs_flat_ops *flats; /* NULL: a dry run, without memory and peers */
    const zs_round_ops *rounds;
    const zs_reader_ops *readers;
    const zs_talk_ops *talk;
    const zs_state_ops *state; /* NULL: peers cannot read this rank's memory */
    /* Memory of this rank for codes of all shards of `shard_bytes` during a gather, see zs_target; 0: such shards
     * cross hosts as they are. NULL: nothing is coded. */
    size_t (*code_room)(const zs_comm *, zs_wire, zs_dtype, size_t shard_bytes);
    bool codes_apart; /* that memory is never a round's, see zs_arena_take_apart */
    /* Memory of the transport itself on this rank, besides flats and buckets, for all its models together. Includes
     * memory that was never touched. */
    size_t (*bytes)(const zs_comm *);
    void (*close)(zs_comm *);
    void (*destroy)(zs_comm *); /* called only by the last zs_comm_release */
} zs_comm_ops;

/* Head of every transport's own struct. Reference-counted: units, readers and Python hold it. */
struct zs_comm {
    const zs_comm_ops *ops;
    int rank, world;
    int per_host;               /* neighboring ranks share a host, this many on each; 0: all share one */
    const zs_device *device;    /* of flats and buckets */
    double timeout;             /* seconds that one wait may take */
    double patience;            /* (mapped) and so many more, see zs_comm_set_near */
    zs_comm *near;              /* learns why this one is lost, NULL: none; counted reference */
    _Atomic(char *) lost;       /* (c10d) why calls now fail, NULL: they do not; set once; owned */
    uint64_t reading;           /* (not mapped) the purpose of gathers, see zs_reading_encode */
    _Atomic bool waiting;       /* (c10d) for peers to reach a collective; any thread may read it */
    uint64_t models;            /* readers so far */
    zs_model model;             /* whose unit is gathered or reduced next */
    bool heard;                 /* a peer's give_up failed a collective here; the code that handles that clears it */
    zs_fingerprint fingerprint; /* of all models that use it, see zs_comm_publish_fingerprint */
    bool apart;                 /* fingerprints were found to differ, and not to agree again since */
    bool failed;                /* a wait or a collective has, so a failing end need not be reported */
    bool ended;                 /* see zs_comm_end */
    bool is_control;            /* of a transport for GPUs, which keeps the fingerprints */
    zs_turns *turns;            /* where collectives pair up by order, see turn.h; NULL: elsewhere; borrowed */
    zs_diagnostics texts;       /* see zs_comm_publish */
    zs_diagnostics *others;     /* [world] each rank's published texts, NULL: unknown, or `published` knows; owned */
    /* Sessions that have ended; their streams' work precedes all later work of the compute stream. */
    uint64_t sessions;
    _Atomic(const void *) user; /* the thread that is in a collective, or (mapped) in a wait; NULL: none */
    int entered;                /* how often it is */
    zs_refs refs;
};

/* --- the calls ---------------------------------------------------------------------------------------------------- */

/* This thread begins a collective, perhaps within another one, that ranks pair up by order / has left it. ZS_ERR_STATE
 * while another thread is in one: ranks would start these in different orders. */
zs_status zs_comm_enter(zs_comm *comm);
void zs_comm_leave(zs_comm *comm);
/* Returns the status of `call`, which is one. */
#define ZS_COLLECTIVE(comm, call) \
    ZS_TRY(zs_comm_enter(comm));  \
    zs_status status = (call);    \
    return zs_comm_leave(comm), status

/* Flats: see zs_flat_ops. */
static inline zs_status zs_comm_flat_new(zs_comm *comm, size_t shard_bytes, zs_flat_mem *out)
{
    return comm->ops->flats->flat_new(comm, shard_bytes, out);
}

/* Frees one. */
static inline void zs_comm_flat_free(zs_comm *comm, zs_flat_mem *flat)
{
    comm->ops->flats->flat_free(comm, flat);
}

/* Does it allocate full buffers itself? */
static inline bool zs_comm_makes_slots(const zs_comm *comm)
{
    return comm->ops->flats->slot_new != NULL;
}

/* Allocates memory for full buffers. */
static inline zs_status zs_comm_slot_new(zs_comm *comm, size_t bytes, zs_mem **out)
{
    return comm->ops->flats->slot_new(comm, bytes, out);
}

/* Memory for a gather's codes. */
static inline size_t zs_comm_code_room(const zs_comm *comm, zs_wire code, zs_dtype dtype, size_t shard_bytes)
{
    return comm->ops->code_room != NULL ? comm->ops->code_room(comm, code, dtype, shard_bytes) : 0;
}

/* Starts to gather a flat. */
static inline zs_status zs_comm_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to,
                                             zs_gathering **out)
{
    ZS_COLLECTIVE(comm, comm->ops->flats->gather_start(comm, flat, unit, to, out));
}

/* Number of ranks that share a slot's memory. */
static inline int zs_comm_slot_sharers(const zs_comm *comm)
{
    return comm->ops->shares_slots ? comm->per_host : 1;
}

/* Waits for it. */
static inline zs_status zs_comm_gather_finish(zs_comm *comm, zs_gathering *gathering)
{
    return comm->ops->flats->gather_finish(comm, gathering);
}

/* Buckets: see zs_round_ops. */
static inline zs_status zs_comm_bucket_new(zs_comm *comm, size_t bytes, zs_bucket *out)
{
    return comm->ops->rounds->bucket_new(comm, bytes, out);
}

/* Frees one. */
static inline void zs_comm_bucket_free(zs_comm *comm, zs_bucket *bucket)
{
    comm->ops->rounds->bucket_free(comm, bucket);
}

/* The capacity of one for `bytes`. */
static inline size_t zs_comm_bucket_room(const zs_comm *comm, size_t bytes)
{
    return comm->ops->rounds->bucket_room(bytes);
}

/* This rank abandons its backward. Only where rounds are collectives. */
static inline zs_status zs_comm_give_up(zs_comm *comm)
{
    ZS_COLLECTIVE(comm, comm->ops->rounds->give_up(comm));
}

/* The transport's memory for a unit of `spec`, or (NULL) without units. */
static inline zs_room zs_comm_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    return comm->ops->rounds->room(comm, spec);
}

/* Allocates what rounds will have out at a time. */
static inline zs_status zs_comm_reserve(zs_comm *comm, const zs_arena *plan)
{
    return comm->ops->rounds->reserve != NULL ? comm->ops->rounds->reserve(comm, plan) : ZS_OK;
}

/* Readers: see zs_reader_ops. Its number is comm->models. */
static inline zs_status zs_comm_reader_new(zs_comm *comm, const char *name, zs_reader **out)
{
    comm->models++;
    return comm->ops->readers->reader_new(comm, name, out);
}

/* Frees one. */
static inline void zs_comm_reader_free(zs_comm *comm, zs_reader *reader)
{
    comm->ops->readers->reader_free(comm, reader);
}

/* A session begins. */
static inline zs_status zs_comm_read_begin(zs_comm *comm, zs_reader *reader, const zs_reading *reading)
{
    return comm->ops->readers->read_begin(comm, reader, reading);
}

/* It ends. */
static inline zs_status zs_comm_read_end(zs_comm *comm, zs_reader *reader, zs_phase phase)
{
    return comm->ops->readers->read_end(comm, reader, phase);
}

/* A write begins. */
static inline zs_status zs_comm_write_begin(zs_comm *comm, zs_reader *reader)
{
    return comm->ops->readers->write_begin != NULL ? comm->ops->readers->write_begin(comm, reader) : ZS_OK;
}

/* It ends. */
static inline void zs_comm_write_end(zs_comm *comm, zs_reader *reader, bool known)
{
    if (comm->ops->readers->write_end != NULL) comm->ops->readers->write_end(comm, reader, known);
}

/* All ranks have reached a collective outside of passes. */
static inline void zs_comm_readers_barrier(zs_comm *comm, zs_reader *reader)
{
    if (comm->ops->readers->meet != NULL) comm->ops->readers->meet(comm, reader);
}

/* A write by hand is complete. */
static inline void zs_comm_write_complete(zs_comm *comm, zs_reader *reader, bool changed)
{
    if (comm->ops->readers->write_complete != NULL) comm->ops->readers->write_complete(comm, reader, changed);
}

/* Small messages: see zs_talk_ops. */
static inline zs_status zs_comm_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_COLLECTIVE(comm, comm->ops->talk->exchange(comm, mine, bytes, all));
}

/* In host memory. */
static inline zs_status zs_comm_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    ZS_COLLECTIVE(comm, comm->ops->talk->broadcast(comm, data, bytes, root));
}

/* In memory at `where`, which is the host's or the transport's device. */
static inline zs_status zs_comm_broadcast_at(zs_comm *comm, zs_where where, void *data, size_t bytes, int root)
{
    const zs_talk_ops *ops = comm->ops->talk;
    bool there = ops->broadcast_device != NULL && zs_same_where(where, comm->device->where);
    ZS_COLLECTIVE(comm, (there ? ops->broadcast_device : ops->broadcast)(comm, data, bytes, root));
}

/* Can device memory be gathered in place? */
static inline bool zs_comm_gathers_device(const zs_comm *comm)
{
    return comm->ops->talk->gather_device != NULL;
}

/* Gathers it. */
static inline zs_status zs_comm_gather_device(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_COLLECTIVE(comm, comm->ops->talk->gather_device(comm, mine, bytes, all));
}

/* This rank cannot continue. */
static inline void zs_comm_abort(zs_comm *comm, const char *reason)
{
    comm->ops->talk->abort(comm, reason);
}

/* The latest text that a peer has published on a topic; NULL: unknown. */
static inline const char *zs_comm_published(const zs_comm *comm, int rank, zs_topic topic)
{
    return comm->ops->talk->published != NULL ? comm->ops->talk->published(comm, rank, topic) : NULL;
}

/* Memory of the transport itself. */
static inline size_t zs_comm_bytes(const zs_comm *comm)
{
    return comm->ops->bytes(comm);
}

/* Disconnects from the peers. */
static inline void zs_comm_close(zs_comm *comm)
{
    comm->ops->close(comm);
}

/* Is it for a dry run, without memory and peers? */
static inline bool zs_comm_is_dry(const zs_comm *comm)
{
    return comm->ops->flats == NULL;
}

#endif
