/* comm_ops.h - a transport's tables of functions, and the calls by which they are reached. See comm.h.
 *
 * Four small tables, for flats, rounds, readers and talk, so that transports share whole tables. Nobody
 * outside comm/ reads them but the calls below, which know what a missing function means.
 */
#ifndef ZS_COMM_OPS_H
#define ZS_COMM_OPS_H

#include "comm/comm_types.h"
#include "comm/fingerprint.h"
#include "comm/round.h"

#include <stdatomic.h>

/* --- the tables --------------------------------------------------------------------------------------------------- */

/* How many kinds of things a transport numbers at most. */
enum { ZS_NUMBERS = 3 };

/* Flats, and gathering them. */
typedef struct zs_flat_ops {
    /* `shard_bytes` per rank. Same calls in the same order on all ranks, but no meeting: a peer's part may be read
     * only inside a reader session (or after an exchange). */
    zs_status (*flat_new)(zs_comm *, size_t shard_bytes, zs_flat_mem *out);
    /* Gives the memory back (peers' mappings of it stay valid, their content does not). */
    void (*flat_free)(zs_comm *, zs_flat_mem *);
    /* New zeroed memory for full buffers, to gather into. The same calls in the same order on all ranks. NULL: the
     * device's memory will do. */
    zs_status (*slot_new)(zs_comm *, size_t bytes, zs_mem **out);
    /* (not mapped) Begins to fill `to` from all ranks' shards, which stay as they are until gather_finish.
     * Collective, in the same order on all ranks; `unit` is the name of the flat's unit, for messages. The flat may
     * be another comm's of this transport. */
    zs_status (*gather_start)(zs_comm *, const zs_flat_mem *, const char *unit, zs_target to, zs_gathering **out);
    /* (not mapped) Waits for it, and frees it whatever comes of it. Any order. */
    zs_status (*gather_finish)(zs_comm *, zs_gathering *);
    /* How far this rank has numbered what all ranks make in the same order, flats and other things: [ZS_NUMBERS].
     * NULL: nothing. */
    void (*numbers)(const zs_comm *, uint64_t *out);
    /* Goes on from there; none is lower than this rank's own. */
    void (*go_on_from)(zs_comm *, const uint64_t *numbers);
} zs_flat_ops;

/* Reducing: what round.c asks of a transport. What is not said to be NULL is there. */
typedef struct zs_round_ops {
    /* At least `bytes`; on shm peers map it by its key when they first collect from it. */
    zs_status (*bucket_new)(zs_comm *, size_t bytes, zs_bucket *out);
    void (*bucket_free)(zs_comm *, zs_bucket *);
    /* What a bucket for `bytes` holds. */
    size_t (*bucket_room)(size_t bytes);
    /* --- units --- */
    size_t unit_bytes; /* of the transport's own struct, headed by a zs_cunit; 0: it has none */
    /* Fills what is behind the head; unit_clear follows also if it fails. Both may be NULL. */
    zs_status (*unit_init)(zs_comm *, zs_cunit *);
    void (*unit_clear)(zs_comm *, zs_cunit *);
    /* Its spec has another name now; NULL: nothing else keeps it. */
    void (*renamed)(zs_comm *, zs_cunit *);
    /* --- a round, in this order; NULL: nothing is to be done, and there is nothing to wait for --- */
    /* May rounds be posted and collected? */
    zs_status (*usable)(zs_comm *);
    /* Sends the header and the bucket, if any. */
    zs_status (*send)(zs_comm *, zs_cunit *);
    /* Has that begun? A failure there has been undone by zs_cunit_undo_post. */
    zs_status (*begun)(zs_comm *, zs_cunit *, zs_wait wait, bool *done);
    /* Once all ranks' are there: sets `data` and `headers`. *ready is set before. */
    zs_status (*arrive)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    /* (ZS_REDUCE_ALL) The sum of the own shards is in the bucket: so are all, where rounds are collectives; the
     * others are told. */
    zs_status (*share)(zs_comm *, zs_cunit *);
    /* Once all have shared. *ready is set before. */
    zs_status (*arrive_shared)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    zs_status (*release)(zs_comm *, zs_cunit *);
    /* Gives back what a round holds: after release, or a failure. */
    void (*drop)(zs_comm *, zs_cunit *);
    /* Waits for what is still under way when the unit is freed. */
    void (*finish)(zs_comm *, zs_cunit *);
    /* Has every peer released the bucket? *ready is set as for peers that have copies. */
    zs_status (*reusable)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);
    /* --- besides --- */
    /* (between rounds) Gradients are `factor` times as large from now on: so is what codes have lost of them. NULL:
     * all is exact. */
    void (*rescale)(zs_comm *, zs_cunit *, double factor);
    /* Tells the peers that this rank will not finish the backward that they are in: the collective that they come to
     * next fails with ZS_ERR_DIVERGED, and `heard` is set; here it succeeds. What was posted before can still be
     * collected. Collective. NULL where shards are mapped: a flag of an empty post says so. */
    zs_status (*give_up)(zs_comm *);
    /* What the transport has for a unit of `spec`, or for none (NULL). */
    zs_room (*room)(const zs_comm *, const zs_cunit_spec *spec);
    /* Makes what rounds will have out at a time, as a plan has it; NULL where that is nothing. */
    zs_status (*reserve)(zs_comm *, const zs_arena *plan);
} zs_round_ops;

/* Who reads whose shards. */
typedef struct zs_reader_ops {
    /* One per model (root), same order on all ranks. Counts reductions, and forwards of each kind since. */
    zs_status (*reader_new)(zs_comm *, const char *name, zs_reader **out);
    void (*reader_free)(zs_comm *, zs_reader *);
    /* A forward is counted; then this waits until every owner has begun that forward too, or stands where this rank
     * may read it alone, and marks this rank as reading. A backward: the same without counting. ZS_ERR_DIVERGED if
     * ranks do not run the same forward and some have changed their parameters by hand. */
    zs_status (*read_begin)(zs_comm *, zs_reader *, const zs_reading *);
    /* Marks as not reading, and returns only when no peer reads this rank's shards. A backward: counts one reduction
     * as well; call it when all its rounds are released. */
    zs_status (*read_end)(zs_comm *, zs_reader *, zs_phase);
    /* This rank is about to write its shards: returns only when no peer reads them, and none does until write_end. A
     * pass that begins ends a write. No-op within a pass. Both NULL where shards are not mapped. */
    zs_status (*write_begin)(zs_comm *, zs_reader *);
    /* `known`: the write is complete, and all ranks make it. Else nobody evaluates with these shards before the next
     * such write or pass; that may be said at any time. */
    void (*write_end)(zs_comm *, zs_reader *, bool known);
    /* What scripts have written by hand is complete on all ranks alike; `changed` as in zs_reading. NULL as above. */
    void (*write_complete)(zs_comm *, zs_reader *, bool changed);
    /* All ranks meet in a collective of the script's: who has looked how often before says nothing of what comes.
     * NULL as above. */
    void (*meet)(zs_comm *, zs_reader *);
    /* See zs_comm_publish_fingerprint; NULL: the head has it. */
    void (*publish_fingerprint)(zs_comm *, zs_reader *, const zs_fingerprint *now);
} zs_reader_ops;

/* Small things said from rank to rank. */
typedef struct zs_talk_ops {
    /* Small all-gather: `bytes` (<= 4096) from each rank into all[world*bytes]; also a barrier. Same order on all
     * ranks. */
    zs_status (*exchange)(zs_comm *, const void *mine, size_t bytes, void *all);
    /* `data` of `root` to all; host memory. */
    zs_status (*broadcast)(zs_comm *, void *data, size_t bytes, int root);
    /* The device's memory, in the compute stream; NULL where that is the host's. */
    zs_status (*broadcast_device)(zs_comm *, void *data, size_t bytes, int root);
    /* As exchange, of the device's memory and any size, in the compute stream; waits for the peers' hosts. NULL
     * where nothing queues. */
    zs_status (*gather_device)(zs_comm *, const void *mine, size_t bytes, void *all);
    /* See zs_comm_publish; NULL: the head has it. */
    void (*tell)(zs_comm *, zs_topic, const char *);
    /* What a peer has told of a topic, as of now; NULL, as for the function itself: that is not known here. */
    const char *(*said)(const zs_comm *, int rank, zs_topic);
    /* Has a rank told that it cannot go on, of those that are all still there? NULL: no. */
    bool (*is_stopped)(const zs_comm *);
    /* Waits until the processes of ranks that have left have ended, for so long at most. NULL: none is known to have
     * left. */
    void (*outlive)(zs_comm *, double seconds);
    /* See zs_comm_end: tells the peers `comm->past` and words. Once all have, *all is set, and `fingerprints`
     * [world] are theirs. NULL: nobody knows. */
    zs_status (*end)(zs_comm *, zs_fingerprint *fingerprints, bool *all);
    /* Tells the peers that this rank cannot go on, and why; their waits fail at once with that text. Idempotent. */
    void (*abort)(zs_comm *, const char *reason);
} zs_talk_ops;

/* A kind of transport. */
typedef struct zs_comm_ops {
    const char *name;         /* "self", "shm", "c10d" */
    size_t shard_align;       /* flats' shard_bytes must be a multiple of this */
    bool mapped;              /* flats come with `full` */
    bool shares_slots;        /* the ranks of a host have the same memory as a slot */
    zs_stream stream;         /* (on devices that queue) where what collect() gives may be read */
    const zs_flat_ops *flats; /* NULL: a dry run, which has no memory and no peers */
    const zs_round_ops *rounds;
    const zs_reader_ops *readers;
    const zs_talk_ops *talk;
    /* What codes of all shards of `shard_bytes` take on a rank while they are gathered, see zs_target; 0: such
     * shards cross hosts as they are. NULL: nothing is coded. */
    size_t (*code_room)(const zs_comm *, zs_wire, zs_dtype, size_t shard_bytes);
    /* Memory that the transport itself has on this rank, besides flats and buckets: of all its models together. As
     * there, what has never been touched is counted too. */
    size_t (*bytes)(const zs_comm *);
    void (*close)(zs_comm *);
    void (*destroy)(zs_comm *); /* called by the last zs_comm_release only */
} zs_comm_ops;

/* Who is asked before ranks meet otherwise than in passes, where some of them may not come (engine/join.h). */
typedef struct zs_meeting {
    zs_status (*ask)(struct zs_meeting *);
    int expected; /* so many meetings that come next need not ask; negative: any number */
} zs_meeting;

/* Head of every transport's own struct. Reference-counted: units, readers and Python hold it. */
struct zs_comm {
    const zs_comm_ops *ops;
    int rank, world;
    int per_host;               /* (CPU) neighbouring ranks are on one host, so many on each; 0: all are on one */
    const zs_device *device;    /* whose memory flats and buckets are */
    double timeout;             /* seconds that one wait may last */
    char *lost;                 /* (c10d) why no call can follow any more, NULL: all is well; owned */
    uint64_t reading;           /* (not mapped) what gathers are for, see zs_reading_encode */
    _Atomic bool waiting;       /* (c10d) for peers to come to a collective; any thread may look */
    uint64_t models;            /* readers so far */
    zs_model model;             /* whose unit is gathered or reduced next */
    bool heard;                 /* a peer's give_up ended a collective here; cleared by who has acted on it */
    zs_fingerprint fingerprint; /* of all models that use it, see zs_comm_publish_fingerprint */
    bool apart;                 /* fingerprints have been found to differ, and not to be the same again since */
    bool failed;                /* a wait or a collective has, so the end is no news */
    bool ended;                 /* see zs_comm_end */
    bool is_control;            /* of a transport for GPUs, which has the fingerprints */
    zs_meeting *meeting;        /* NULL: nobody is asked; borrowed */
    zs_diagnostics words;       /* see zs_comm_publish */
    zs_diagnostics *others;     /* [world] what each rank has told, NULL: not known, or `said` knows; owned */
    /* So many have ended; what streams did in them comes before all that the compute stream does since. */
    uint64_t sessions;
    zs_refs refs;
};

/* --- the calls ---------------------------------------------------------------------------------------------------- */

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

/* Memory for full buffers. */
static inline zs_status zs_comm_slot_new(zs_comm *comm, size_t bytes, zs_mem **out)
{
    const zs_flat_ops *ops = comm->ops->flats;
    return ops->slot_new != NULL ? ops->slot_new(comm, bytes, out) : zs_device_mem_new(comm->device, bytes, out);
}

/* Room for a gather's codes. */
static inline size_t zs_comm_code_room(const zs_comm *comm, zs_wire code, zs_dtype dtype, size_t shard_bytes)
{
    return comm->ops->code_room != NULL ? comm->ops->code_room(comm, code, dtype, shard_bytes) : 0;
}

/* Begins to gather a flat. */
static inline zs_status zs_comm_gather_start(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to,
                                             zs_gathering **out)
{
    return comm->ops->flats->gather_start(comm, flat, unit, to, out);
}

/* Ranks that have the same memory as a slot. */
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

/* What one for `bytes` holds. */
static inline size_t zs_comm_bucket_room(const zs_comm *comm, size_t bytes)
{
    return comm->ops->rounds->bucket_room(bytes);
}

/* This rank will not finish its backward. Only where rounds are collectives. */
static inline zs_status zs_comm_give_up(zs_comm *comm)
{
    return comm->ops->rounds->give_up(comm);
}

/* What the transport has for a unit of `spec`, or for none (NULL). */
static inline zs_room zs_comm_room(const zs_comm *comm, const zs_cunit_spec *spec)
{
    return comm->ops->rounds->room(comm, spec);
}

/* Makes what rounds will have out at a time. */
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

/* All ranks meet elsewhere. */
static inline void zs_comm_readers_barrier(zs_comm *comm, zs_reader *reader)
{
    if (comm->ops->readers->meet != NULL) comm->ops->readers->meet(comm, reader);
}

/* What has been written is complete. */
static inline void zs_comm_write_complete(zs_comm *comm, zs_reader *reader, bool changed)
{
    if (comm->ops->readers->write_complete != NULL) comm->ops->readers->write_complete(comm, reader, changed);
}

/* May ranks meet now? */
static inline zs_status zs_comm_meet(zs_comm *comm)
{
    zs_meeting *meeting = comm->meeting;
    if (meeting == NULL || meeting->expected < 0) return ZS_OK;
    if (meeting->expected == 0) return meeting->ask(meeting);
    meeting->expected--;
    return ZS_OK;
}

/* Talk: see zs_talk_ops. */
static inline zs_status zs_comm_exchange(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    ZS_TRY(zs_comm_meet(comm));
    return comm->ops->talk->exchange(comm, mine, bytes, all);
}

/* Of the host's memory. */
static inline zs_status zs_comm_broadcast(zs_comm *comm, void *data, size_t bytes, int root)
{
    ZS_TRY(zs_comm_meet(comm));
    return comm->ops->talk->broadcast(comm, data, bytes, root);
}

/* Of memory at `where`, which is the host's or the transport's device. */
static inline zs_status zs_comm_broadcast_at(zs_comm *comm, zs_where where, void *data, size_t bytes, int root)
{
    const zs_talk_ops *ops = comm->ops->talk;
    ZS_TRY(zs_comm_meet(comm));
    bool there = ops->broadcast_device != NULL && zs_same_where(where, comm->device->where);
    return (there ? ops->broadcast_device : ops->broadcast)(comm, data, bytes, root);
}

/* May the device's memory be gathered where it is? */
static inline bool zs_comm_gathers_device(const zs_comm *comm)
{
    return comm->ops->talk->gather_device != NULL;
}

/* Gathers it. */
static inline zs_status zs_comm_gather_device(zs_comm *comm, const void *mine, size_t bytes, void *all)
{
    return comm->ops->talk->gather_device(comm, mine, bytes, all);
}

/* This rank cannot go on. */
static inline void zs_comm_abort(zs_comm *comm, const char *reason)
{
    comm->ops->talk->abort(comm, reason);
}

/* What a peer has told of a topic, as of now; NULL: that is not known here. */
static inline const char *zs_comm_published(const zs_comm *comm, int rank, zs_topic topic)
{
    return comm->ops->talk->said != NULL ? comm->ops->talk->said(comm, rank, topic) : NULL;
}

/* Memory that the transport itself has. */
static inline size_t zs_comm_bytes(const zs_comm *comm)
{
    return comm->ops->bytes(comm);
}

/* Meets nobody any more. */
static inline void zs_comm_close(zs_comm *comm)
{
    comm->ops->close(comm);
}

/* Is it for a dry run, with neither memory nor peers? */
static inline bool zs_comm_is_dry(const zs_comm *comm)
{
    return comm->ops->flats == NULL;
}

#endif
