/* comm.h - how ranks exchange bytes: one table of functions, one implementation per transport.
 *
 * The one idea: a unit never names a transport. It asks for memory that the transport can share (flats and buckets),
 * posts a full bucket, later collects pointers to every rank's part of its own slice, sums them itself (in rank order)
 * and releases them. On `shm` the pointers lead straight into the peers' memory and nothing is copied; on `c10d` they
 * lead into a receive buffer. And where a transport can map all ranks' shards side by side (shm), the mapping *is* the
 * full buffer: an unshard moves no byte.
 *
 *   flat    memory of one dtype of a unit: this rank's shard and, if mapped, the whole full buffer
 *   bucket  full-size gradient memory that peers can read
 *   cunit   what the transport knows of a unit: its number (equal on all ranks), slice sizes, its post record
 *   reader  a model's right to read the peers' shards: opened at a root forward or backward, closed at its end
 *
 * Rules for every transport: calls come from one thread at a time; a wait ends by the deadline (timeout) or within
 * seconds when a peer died, with ZS_ERR_TIMEOUT / ZS_ERR_PEER and a message that names the rank, and what was waited
 * for; nothing ever blocks without both.
 */
#ifndef ZS_COMM_H
#define ZS_COMM_H

#include "base/memory.h"
#include "base/passes.h"
#include "base/status.h"
#include "device/arena.h"
#include "device/device.h"

enum { ZS_MAX_FLATS = 8 }; /* dtype x trainable groups in one unit */

typedef struct zs_comm zs_comm;
typedef struct zs_cunit zs_cunit;
typedef struct zs_reader zs_reader;
typedef struct zs_gathering zs_gathering;

/* Where a gather goes. */
typedef struct zs_target {
    zs_mem *mem; /* borrowed; kept where a gather that was broken off may still write there */
    char *full;  /* within it, world * shard_bytes */
} zs_target;

/* One flat buffer. Full size is world * shard_bytes; rank r's shard is bytes [r*shard_bytes, (r+1)*shard_bytes). */
typedef struct zs_flat_mem {
    zs_mem *mem;        /* counted reference to the memory under `shard` (and `full`) */
    char *shard;        /* this rank's shard, read-write, zeroed at birth */
    char *full;         /* the whole full buffer if it is always addressable (shm, self), else NULL: gather it */
    size_t shard_bytes; /* multiple of shard_align */
    uint64_t key;       /* the transport's own name for it */
} zs_flat_mem;

/* Full-size gradient memory. */
typedef struct zs_bucket {
    char *ptr;    /* this rank's own packed gradients */
    size_t bytes; /* capacity */
    uint64_t key; /* the transport's own name for it */
    zs_mem *mem;  /* counted reference */
} zs_bucket;

/* What collect() hands out, valid until release(). Arrays of length world are in rank order. */
typedef struct zs_sources {
    const char **data; /* [world]: this rank's slice of trainable flat f, as rank r has it, is at data[r] + at[f]; NULL:
                            * nothing posted */
    const size_t *at;  /* [n_slices] */
    const uint64_t **used; /* [world]: bitmap of the parameters that had a gradient there; never NULL */
} zs_sources;

/* How gradients of a unit are reduced. */
typedef enum zs_reduce_mode {
    ZS_REDUCE_SCATTER, /* each rank gets its slice of the sum */
    ZS_REDUCE_ALL,     /* each rank gets the whole sum: after collect, share() own slice, then collect_shared() */
} zs_reduce_mode;

typedef struct zs_cunit_spec {
    const char *name; /* for messages; copied */
    size_t n_params;  /* length of the used bitmap in bits */
    int n_slices;     /* trainable flats, <= ZS_MAX_FLATS; 0: nothing to reduce */
    /* One rank's slice of trainable flat f in the bucket (wire dtype), multiple of 64. */
    size_t slice_bytes[ZS_MAX_FLATS];
    zs_reduce_mode mode;
    int parts; /* slices that a bucket is cut into; 0: one for each rank */
    /* [world] which slice a rank sums, where several ranks sum the same (hybrid); copied; NULL: rank r sums slice r.
     * ZS_REDUCE_SCATTER only. */
    const int *part_of;
} zs_cunit_spec;
/* Bucket layout: flat after flat, each parts * slice_bytes[f] long: slice p of flat f starts at
 * parts * (slice_bytes[0] + ... + slice_bytes[f-1]) + p * slice_bytes[f]. */

/* What a reader session belongs to: a pass, with two kinds of forward. A rank that evaluates while others train takes no
 * part in their forward. */
typedef enum zs_pass {
    ZS_PASS_TRAIN,    /* a backward may follow: autograd records */
    ZS_PASS_EVALUATE, /* any other forward, and sessions opened by hand */
    ZS_PASS_BACKWARD
} zs_pass;

/* What a reader session is for. */
typedef struct zs_reading {
    zs_pass pass;
    bool eval_mode;  /* the module is in evaluation mode */
    bool changed;    /* the shards are not as the last write has left them, see sample.h */
    uint64_t sample; /* the same number as long as they stay as they are */
} zs_reading;

/* What a transport has on this rank for itself, in bytes. */
typedef struct zs_room {
    size_t fixed;          /* without units, and with one reader */
    size_t record;         /* of a unit, as long as it lives */
    size_t sent, received; /* of one round, while it is out */
    size_t talk;           /* of what is said before each collective */
    size_t piece;          /* of a broadcast, at most */
} zs_room;

enum { ZS_MISHAP = 256 }; /* longest account of a mishap */

typedef struct zs_comm_ops {
    const char *name;   /* "self", "shm", "c10d" */
    size_t shard_align; /* flats' shard_bytes must be a multiple of this */
    bool mapped;        /* flats come with `full` */
    zs_lane lane;       /* (on devices that queue) where what collect() gives may be read */

    zs_status (*flat_new)(zs_comm *, size_t shard_bytes, zs_flat_mem *out);
    void (*flat_free)(zs_comm *, zs_flat_mem *);
    zs_status (*slot_new)(zs_comm *, size_t bytes, zs_mem **out); /* NULL: the device's memory will do */
    zs_status (*gather_start)(zs_comm *, const zs_flat_mem *, const char *unit, zs_target to,
                              zs_gathering **out); /* collective; NULL if mapped */
    zs_status (*gather_finish)(zs_comm *, zs_gathering *);

    zs_status (*bucket_new)(zs_comm *, size_t bytes, zs_bucket *out);
    void (*bucket_free)(zs_comm *, zs_bucket *);

    zs_status (*cunit_new)(zs_comm *, const zs_cunit_spec *, zs_cunit **out);
    void (*cunit_free)(zs_comm *, zs_cunit *);
    void (*cunit_renamed)(zs_comm *, zs_cunit *); /* its spec has another name now; NULL: nothing else keeps it */

    zs_status (*post)(zs_comm *, zs_cunit *, const zs_bucket *bucket, const uint64_t *used);
    zs_status (*collect)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready, zs_sources *out);
    zs_status (*share)(zs_comm *, zs_cunit *);
    zs_status (*collect_shared)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready, zs_sources *out);
    zs_status (*release)(zs_comm *, zs_cunit *);
    zs_status (*reusable)(zs_comm *, zs_cunit *, zs_wait wait, bool *ready);

    zs_status (*reader_new)(zs_comm *, const char *name, zs_reader **out);
    void (*reader_free)(zs_comm *, zs_reader *);
    zs_status (*read_begin)(zs_comm *, zs_reader *, const zs_reading *);
    zs_status (*read_end)(zs_comm *, zs_reader *, zs_phase);
    zs_status (*write_begin)(zs_comm *, zs_reader *);           /* NULL where shards are not mapped */
    void (*write_end)(zs_comm *, zs_reader *);                  /* likewise */
    zs_status (*give_up)(zs_comm *);                            /* collective; NULL if mapped */
    void (*tell_history)(zs_comm *, zs_reader *, uint64_t now); /* NULL: the head has it */
    void (*tell_mishap)(zs_comm *, const char *);               /* likewise */
    const char *(*mishap_of)(const zs_comm *, int rank);        /* what a peer told last; NULL: nobody knows */

    size_t (*bytes)(const zs_comm *);
    zs_room (*room)(const zs_cunit_spec *spec, int world);
    size_t (*bucket_room)(size_t bytes);
    zs_status (*reserve)(zs_comm *, const zs_arena *plan);

    zs_status (*exchange)(zs_comm *, const void *mine, size_t bytes, void *all);
    zs_status (*broadcast)(zs_comm *, void *data, size_t bytes, int root);
    zs_status (*broadcast_device)(zs_comm *, void *data, size_t bytes, int root);     /* NULL where that is the same */
    zs_status (*gather_device)(zs_comm *, const void *mine, size_t bytes, void *all); /* NULL where nothing queues */
    void (*abort)(zs_comm *, const char *reason);
    void (*close)(zs_comm *);
    void (*destroy)(zs_comm *); /* called by the last zs_comm_release only */
} zs_comm_ops;

/* Head of every transport's own struct. Reference-counted: units, readers and Python hold it. */
struct zs_comm {
    const zs_comm_ops *ops;
    int rank, world;
    const zs_device *device; /* whose memory flats and buckets are */
    double timeout;          /* seconds that one wait may last */
    char *lost;              /* (c10d) why no call can follow any more, NULL: all is well; owned */
    uint64_t reading;        /* (not mapped) what gathers are for, see zs_reading_told */
    bool heard;              /* a peer's give_up ended a collective here; cleared by who has acted on it */
    uint64_t history;        /* of all models that use it, see zs_comm_tell_history */
    char mishap[ZS_MISHAP];  /* see zs_comm_tell_mishap */
    /* So many have ended; what lanes did in them comes before all that the compute lane does since. */
    uint64_t sessions;
    _Atomic long refs;
};

/* --- the calls; see the table for which exist where --------------------------------------------------------------- */

/* Adds a reference; returns `comm`. */
zs_comm *zs_comm_retain(zs_comm *comm);

/* Gives a reference back; the last one closes and frees the transport. NULL allowed. */
void zs_comm_release(zs_comm *comm);

/* Has every wait of every transport that can (shm) ask `interrupted` about ten times a second. If it says true, the wait
 * ends with ZS_ERR_TORCH (`interrupted` has set a Python exception, say KeyboardInterrupt). NULL: nobody is asked. */
void zs_comm_on_wait(bool (*interrupted)(void));

/* flat_new: `shard_bytes` per rank. Same calls in the same order on all ranks, but no meeting: a peer's part may be
 *   read only inside a reader session (or after an exchange).
 * flat_free: gives the memory back (peers' mappings of it stay valid, their content does not).
 * slot_new: new zeroed memory for full buffers, to gather into. The same calls in the same order on all ranks.
 * gather_start: begins to fill `to` from all ranks' shards, which stay as they are until gather_finish. Collective, in the
 *   same order on all ranks; `unit` is the name of the flat's unit, for messages. The flat may be another comm's of this
 *   transport.
 * gather_finish: waits for it, and frees `gathering` whatever comes of it. Any order.
 * bucket_new: at least `bytes`; on shm peers map it by its key when they first collect from it.
 * cunit_new: numbers units in creation order; all ranks create the same ones in the same order.
 *
 * Reducing, per unit and per round (a unit may go through several rounds in one backward; counted by the transport):
 * post: hands the packed `bucket` (NULL if no parameter of the unit had a gradient here) and the `used` bitmap to the
 *   peers. Never waits on shm; collective on c10d. The bucket must not be touched until reusable() says so.
 * collect: *ready is set once all ranks have posted this round; see zs_wait for how long to wait for that; `out`
 *   then gives every rank's bytes, valid until release.
 * share (ZS_REDUCE_ALL only): the caller has written the sum of its own slices into its own bucket, in place; says so
 *   to the peers. In this mode post's bucket is never NULL: there must be room for the sum.
 * collect_shared (ZS_REDUCE_ALL only): as collect, once all ranks have shared; data[r] + offset of slice r (of rank r) in the bucket is
 *   then rank r's finished sum.
 * release: this rank has read all it needs of the round.
 * reusable: *ready once every peer has released the round this rank posted last (true if none is out).
 *
 * reader_new: one per model (root), same order on all ranks. Counts reductions, and forwards of each kind since.
 * read_begin(TRAIN, EVALUATE): counts a forward, then waits until every owner has begun that forward too, or stands where
 *   this rank may read it alone; then marks this rank as reading. read_begin(BACKWARD): same without counting.
 *   ZS_ERR_DIVERGED if ranks do not run the same forward and some have changed their parameters by hand.
 * read_end(FORWARD): marks as not reading, and returns only when no peer reads this rank's shards.
 * read_end(BACKWARD): the same, and counts one reduction. Call it when all rounds of the backward are released.
 *   No-ops where shards are not mapped (self, c10d).
 * write_begin: this rank is about to write its shards: returns only when no peer reads them, and none does until write_end.
 *   A pass that begins ends a write. No-op within a pass.
 * give_up: tells the peers that this rank will not finish the backward that they are in: the collective that they come to
 *   next fails with ZS_ERR_DIVERGED, and `heard` is set; here it succeeds. What was posted before can still be collected.
 *   (Where shards are mapped, a bit in the `used` bitmap of an empty post says so.)
 *
 * bytes: memory that the transport itself has on this rank, besides flats and buckets: of all its models together. As
 *   there, what has never been touched is counted too.
 *
 * reserve: makes what rounds will have out at a time, as a plan has it; NULL where that is nothing.
 *
 * exchange: small all-gather: `bytes` (<= 4096) from each rank into all[world*bytes]; also a barrier. Same order on all
 *   ranks. broadcast: `data` of `root` to all; host memory. broadcast_device: memory of the device, in the compute lane.
 *   gather_device: as exchange, of the device's memory and any size, in the compute lane; waits for the peers' hosts.
 * abort: tells the peers that this rank cannot go on, and why; their waits fail at once with that text. Idempotent.
 */

/* gather_start and gather_finish in one. */
zs_status zs_comm_gather(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to);

/* What messages call a unit of this name: "(root)" for the outermost, whose name is empty; borrowed. */
const char *zs_unit_label(const char *name);

/* Something has happened to the parameters on this rank that must happen on all ranks, or on none: `history`, a number made
 * of all such events of a model, was `before` and is `now`. It is compared with the peers' whenever ranks meet to gather
 * parameters or to reduce gradients; where it differs, that fails on all ranks with ZS_ERR_DIVERGED. `reader`: the model's,
 * if this transport made it, else NULL. Never waits. */
void zs_comm_tell_history(zs_comm *comm, zs_reader *reader, uint64_t before, uint64_t now);

/* What has failed on this rank lately, as a clause that goes on "rank 0 ": peers put it into the errors that come of it.
 * "": nothing. Never waits. */
void zs_comm_tell_mishap(zs_comm *comm, const char *what);

/* "; rank 0 raised ..." for all ranks that have told of a mishap, as far as this one knows; "" if none has. */
void zs_comm_mishaps(const zs_comm *comm, char *text, size_t size);

/* The failure of a rank that finds that rank `other` has another history. */
zs_status zs_comm_fail_history(const zs_comm *comm, int other);

/* What peers are told of a session, where they are told with each gather; 0 is a training forward. */
uint64_t zs_reading_told(const zs_reading *reading);

/* Are two of these of one forward of all ranks? And had one rank changed its parameters by hand? */
bool zs_reading_alike(uint64_t a, uint64_t b);
bool zs_reading_changed(uint64_t told);

/* The failure of ranks that do not run the same forward, where rank `changed` has changed its parameters by hand. */
zs_status zs_comm_fail_apart(const zs_comm *comm, int changed);

/* Gives the unit the name that it has in an outer model. All ranks do so before its first round, or none. */
zs_status zs_cunit_rename(zs_comm *comm, zs_cunit *unit, const char *name);

/* What `bytes` is made of, without a transport: room() for a unit of `spec`, or of none (NULL); bucket_room() what a bucket
 * for `bytes` holds. Two functions of the table that need no comm. */

/* The table of the transport called `name` ("self", "shm", "c10d"); NULL if there is none. */
const zs_comm_ops *zs_comm_ops_of(const char *name);

/* A transport that stands for another, of so many ranks, where only sizes are asked for: it has no peers and no memory.
 * ZS_ERR_VALUE for an unknown name. */
zs_status zs_comm_outline_new(const char *name, int rank, int world, zs_comm **out);

/* World of one, with flats and buckets on `device`; every call is a no-op or a copy. */
zs_status zs_comm_self_new(const zs_device *device, zs_comm **out);

/* --- shm: one step at a time, because addresses travel over torch's store in between --------------------------------- */

/* Opens a listening socket with a fresh abstract name, makes the memory file; `address` (size >= 108) gets the name. */
zs_status zs_comm_shm_new(int rank, int world, double timeout, char *address, size_t size, zs_comm **out);

/* Connects to all peers: `addresses` [world] as they were given out, `token` 16 bytes equal on all ranks. Exchanges
 * memory files and pidfds. A failure leaves the comm fit only for release (the caller then falls back to c10d). */
zs_status zs_comm_shm_connect(zs_comm *comm, const char *const *addresses, const unsigned char token[16]);

/* --- c10d ---------------------------------------------------------------------------------------------------------- */

/* Over the process group that torch registered under `group_name`; resolved in torch_c10d.cpp. */
zs_status zs_comm_c10d_new(const char *group_name, int rank, int world, double timeout, zs_comm **out);

/* --- GPUs ---------------------------------------------------------------------------------------------------------- */

struct zs_mover;

/* Flats and buckets on the mover's device; `mover` (mover.h) is taken over, whatever comes of it. `control` (which gets a
 * reference) is a transport between the hosts of the same ranks, and goes on to be usable for itself. */
zs_status zs_comm_gpu_new(zs_comm *control, struct zs_mover *mover, zs_comm **out);

#endif
