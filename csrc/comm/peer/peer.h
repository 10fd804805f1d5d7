/* peer.h - the inside of the transport "peer": GPUs of one host, or ranks on one GPU, that map each other's memory.
 *
 *   backend_peer.c   its making and end; gathers and broadcasts
 *   peer_memory.c  memory that can be mapped
 *   peer_maps.c    mappings of the peers' memory, and when they are closed
 *   peer_flags.c   the numbers by which streams of different processes wait for each other
 *   peer_round.c   reducing: the sums read the peers' buckets where they lie
 *   peer_watch.c   dead peers and deadlines
 *   peer_end.c     when mapped memory may be freed at the end
 *
 * The one idea: each rank has a pad of numbers that only grow. A stream says that it has come to move k by writing k into
 * every peer's pad, and waits until its own pad has k from every peer; both are done by the GPU's front end, so neither a host
 * nor a kernel ever spins. Bytes are pulled by who wants them.
 */
#ifndef ZS_PEER_H
#define ZS_PEER_H

#include "comm/gpu/gpu.h"
#include "comm/kin.h"
#include "comm/peer/peer_memory.h"
#include "comm/watchdog.h"

#include <pthread.h>

enum {
    ZS_PEER_UNITS = 4096,    /* that may be alive at a time */
    ZS_PEER_STAGE = 1 << 20, /* bytes of a broadcast that go at a time */
    ZS_PEER_EVENTS = 16,     /* moves that are looked after at a time */
};

/* What a number in a pad says of the rank that wrote it. Of streams and units alike; streams do not share. */
typedef enum zs_peer_word {
    ZS_PEER_READY,  /* its part may be read */
    ZS_PEER_SHARED, /* its sum may be read */
    ZS_PEER_DONE,   /* it has read all parts */
    ZS_PEER_WORDS
} zs_peer_word;

/* One move that has been queued. */
typedef struct zs_peer_move {
    zs_cu_event event; /* NULL: none yet */
    bool out;          /* not known to have ended */
    char what[96];
} zs_peer_move;

/* What the watchdog's thread and the program's share. */
typedef struct zs_peer_watch {
    zs_watchdog entry; /* first */
    pthread_mutex_t lock;
    zs_status failure; /* ZS_OK, or why nothing is moved any more */
    char why[600];     /* the words of that */
    bool tell_peers;   /* their streams are let go as well as ours */
    bool closed;       /* in good order: that is the failure, and no pad is written any more */
    zs_peer_move moves[ZS_PEER_EVENTS];
    uint64_t count;      /* of moves so far */
    uint64_t stuck;      /* the oldest that had not ended when it was last looked at, counted from 1; 0: none */
    double since;        /* when it became the oldest */
    double gone_since;   /* when a peer was first seen gone; 0: never */
    char gone[200];      /* which, in words: those that end because of that come later */
    zs_cu_stream rescue; /* where nothing else is queued */
} zs_peer_watch;

typedef struct zs_peer_maps zs_peer_maps;

typedef struct zs_peer {
    zs_backend base;
    zs_peer_watch watch;
    zs_comm *control;  /* counted reference */
    unsigned lifetime; /* zs_lifetime() at birth */
    zs_kin *kin;       /* owned */
    zs_peer_maps *maps;
    zs_mem *pad;                    /* of numbers, and the stage of broadcasts behind them */
    char **pads;                    /* [world] as they are mapped here; owned */
    zs_mem *stages[ZS_STREAMS];     /* what shards that peers can not map are read from; NULL: none yet */
    uint32_t moves[ZS_STREAMS];     /* so many so far */
    uint32_t rounds[ZS_PEER_UNITS]; /* likewise, by the unit's place */
    bool taken[ZS_PEER_UNITS];      /* a living unit has that place */
    uint64_t units;                 /* so many so far */
    bool parted; /* no peer has anything of this rank mapped but its pad, which none writes any more */
} zs_peer;

/* The backend of a transport of this kind. */
static inline zs_peer *zs_peer_of(zs_comm *comm)
{
    return (zs_peer *)((zs_gpu_comm *)comm)->backend;
}

/* --- peer_flags.c -------------------------------------------------------------------------------------------------------- */

/* Bytes of the pad's numbers, for so many ranks; the stage follows. */
size_t zs_peer_pad_bytes(int world);

/* Where the numbers of all ranks for a stream, or for a unit's place, lie in a pad. */
size_t zs_peer_stream_words(const zs_peer *self, zs_stream stream, zs_peer_word word);
size_t zs_peer_unit_words(const zs_peer *self, uint32_t place, zs_peer_word word);

/* Where those lie that are 1 once a rank has closed its mappings. */
size_t zs_peer_end_words(const zs_peer *self);

/* Queues in `stream`: this rank's number in the peers' pads becomes `value`. What was queued before is done by then. */
zs_status zs_peer_say(zs_peer *self, zs_stream stream, size_t words, uint32_t value);

/* Queues in `stream`: a wait until every peer's number in the own pad is `value` or later. */
zs_status zs_peer_hear(zs_peer *self, zs_stream stream, size_t words, uint32_t value);

/* One after the other, by fewer calls. */
zs_status zs_peer_meet(zs_peer *self, zs_stream stream, size_t words, uint32_t value);

/* Has every wait for the pad of rank `r` end, those to come too. By a stream where nothing waits. */
void zs_peer_let_go(zs_peer *self, int r);

/* --- peer_maps.c --------------------------------------------------------------------------------------------------------- */

/* New record without mappings. */
zs_status zs_peer_maps_new(int rank, int world, zs_peer_maps **out);

/* What is mapped so far, the peers' pads, is to stay to the end. */
void zs_peer_maps_keep(zs_peer_maps *maps);

/* Closes all mappings, or all but what is to stay. */
void zs_peer_maps_close(zs_peer_maps *maps, bool all);

/* Closes all mappings and frees the record. What the peers were told of is given up if they are known to have `parted` from it;
 * else it stays the process's. NULL allowed. */
void zs_peer_maps_free(zs_peer_maps *maps, bool parted);

/* Where `ptr` is for the peers; its allocation is kept until they have been told that it is gone. ZS_ERR_STATE for memory
 * that no peer can map. */
zs_status zs_peer_tell(zs_peer_maps *maps, const void *ptr, zs_peer_address *out);

/* Where a peer's address is here; its allocation is mapped when it is first met. */
zs_status zs_peer_map(zs_peer_maps *maps, int r, const zs_peer_address *address, char **out);

/* The shards that belong to this rank's `shard`, of which the ranks tell each other when it is first asked for: collective then.
 * out[world], valid until the next call. */
zs_status zs_peer_shards(zs_peer *self, const void *shard, char *const **out);

/* How many allocations wait to be given up. */
uint32_t zs_peer_gone(zs_backend *backend);

/* Has the peers close their mappings of those, and gives them up. Collective; waits for this rank's streams. */
zs_status zs_peer_settle(zs_backend *backend);

/* --- peer_end.c ---------------------------------------------------------------------------------------------------------- */

/* A new pad, zeroed in the compute stream. */
zs_status zs_peer_pad_new(const zs_device *device, size_t bytes, zs_mem **out);

/* Closes the mappings in good order, nothing being queued, and waits for the peers to do so too, though not for long. Of one
 * that has failed: nothing. */
void zs_peer_part(zs_peer *self);

/* Frees the maps, and what no peer has mapped. */
void zs_peer_give_back(zs_peer *self);

/* --- peer_watch.c -------------------------------------------------------------------------------------------------------- */

/* Begins to look after `self`, whose pads are mapped. */
zs_status zs_peer_watch_begin(zs_peer *self);

/* Looks no more, and frees what that took. Of one that has not begun too. */
void zs_peer_watch_end(zs_peer *self);

/* Looks after what has just been queued in `stream`: "the <what> of unit <name>". */
zs_status zs_peer_watch_move(zs_peer *self, zs_stream stream, const char *what, const char *name);

/* ZS_OK, or why nothing can be moved any more. */
zs_status zs_peer_check(zs_backend *backend);

/* Nothing can be moved any more, for `why`: streams here and at the peers are let go. The first reason stays. */
void zs_peer_abort(zs_backend *backend, const char *why);

/* The host waits for all streams, `seconds` at most. */
zs_status zs_peer_drain(zs_peer *self, double seconds);

/* --- peer_round.c: units' part of the table, as comm_ops.h has it ------------------------------------------------------------ */

/* room: nothing is received, so units take none. */
zs_room zs_peer_room(const zs_comm *comm, const zs_cunit_spec *spec);

/* cunit_new. ZS_ERR_STATE where there are ZS_PEER_UNITS already. */
zs_status zs_peer_cunit_new(zs_comm *comm, const zs_cunit_spec *spec, zs_cunit **out);

/* cunit_free. NULL allowed. */
void zs_peer_cunit_free(zs_comm *comm, zs_cunit *cunit);

/* cunit_renamed. */
void zs_peer_cunit_renamed(zs_comm *comm, zs_cunit *cunit);

/* post: tells where the bucket is, and queues that it may be read. */
zs_status zs_peer_post(zs_comm *comm, zs_cunit *cunit, const zs_bucket *bucket, const uint64_t *used);

/* collect: waits for the peers' hosts; the reduce stream, for their buckets. */
zs_status zs_peer_collect(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* share. */
zs_status zs_peer_share(zs_comm *comm, zs_cunit *cunit);

/* collect_shared. */
zs_status zs_peer_collect_shared(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready, zs_sources *out);

/* release. */
zs_status zs_peer_release(zs_comm *comm, zs_cunit *cunit);

/* reusable: once it is released here; the compute stream waits for the peers. */
zs_status zs_peer_reusable(zs_comm *comm, zs_cunit *cunit, zs_wait wait, bool *ready);

#endif
