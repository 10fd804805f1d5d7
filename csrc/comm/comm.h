/* comm.h - how ranks exchange bytes: tables of functions (comm_ops.h), one implementation per transport.
 *
 * A unit never names a transport. It asks for memory that the transport can share (flats and buckets),
 * posts a full bucket, later collects pointers to every rank's part of its own shard, sums them itself (in rank order)
 * and releases them. On `shm` the pointers lead straight into the peers' memory and nothing is copied; on `c10d` they
 * lead into a receive buffer. And where a transport can map all ranks' shards side by side (shm), the mapping *is* the
 * full buffer: an unshard moves no byte.
 *
 *   flat    memory of one dtype of a unit: this rank's shard and, if mapped, the whole full buffer
 *   bucket  full-size gradient memory that peers can read
 *   cunit   what the transport knows of a unit: its number (equal on all ranks), shard sizes, its round (round.h)
 *   reader  a model's right to read the peers' shards: opened at a root forward or backward, closed at its end
 *
 * Rules for every transport: calls come from one thread at a time; a wait ends by the deadline (timeout) or within
 * seconds when a peer died, with ZS_ERR_TIMEOUT / ZS_ERR_PEER and a message that names the rank, and what was waited
 * for; nothing ever blocks without both.
 */
#ifndef ZS_COMM_H
#define ZS_COMM_H

#include "comm/comm_ops.h"

/* Adds a reference; returns `comm`. */
zs_comm *zs_comm_retain(zs_comm *comm);

/* Gives a reference back; the last one closes and frees the transport. NULL allowed. */
void zs_comm_release(zs_comm *comm);

/* Has every wait of every transport that can (shm) ask `interrupted` about ten times a second. If it says true, the
 * wait ends with ZS_ERR_TORCH (`interrupted` has set a Python exception, say KeyboardInterrupt). NULL: nobody is
 * asked. */
void zs_comm_on_wait(bool (*interrupted)(void));

/* Are there peers that map this rank's memory? */
bool zs_comm_shares_memory(const zs_comm *comm);

/* This rank ends, after those that are to blame for it: waits so long at most. */
void zs_comm_outlive(zs_comm *comm, double seconds);

/* Has a rank told that it cannot go on, though none is gone? */
bool zs_comm_is_stopped(zs_comm *comm);

/* gather_start and gather_finish in one. */
zs_status zs_comm_gather(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to);

/* All ranks number from here on alike: some may have failed where others have made a model. Collective. */
zs_status zs_comm_align(zs_comm *comm);

/* What messages call a unit of this name: "(root)" for the outermost, whose name is empty; borrowed. */
const char *zs_unit_label(const char *name);

/* Something has happened to a model's parameters on this rank that must happen on all ranks, or on none: what was
 * `before` is `now`. It is compared with the peers' where ranks meet to gather parameters; where it differs, that
 * fails on all ranks with ZS_ERR_DIVERGED. `reader`: the model's, if this transport made it, else NULL. Never waits. */
void zs_comm_publish_fingerprint(zs_comm *comm, zs_reader *reader, const zs_fingerprint *before,
                                 const zs_fingerprint *now);

/* What peers are told of a session, where they are told with each gather; 0 is a training forward. */
uint64_t zs_reading_encode(const zs_reading *reading);

/* Are two of these of one forward of all ranks? And had one rank changed its parameters by hand? */
bool zs_reading_alike(uint64_t a, uint64_t b);
bool zs_reading_changed(uint64_t told);

/* Is it of a backward? And of a forward that no backward follows? */
bool zs_reading_is_backward(uint64_t told);
bool zs_reading_is_look(uint64_t told);

/* The failure of ranks that do not run the same forward, where rank `changed` has changed its parameters by hand. */
zs_status zs_comm_fail_apart(const zs_comm *comm, int changed);

/* The table of the transport called `name` ("self", "shm", "c10d"); NULL if there is none. */
const zs_comm_ops *zs_comm_ops_of(const char *name);

/* Which of the ranks this one is, and how they lie on hosts. */
typedef struct zs_ranks_of_hosts {
    int rank, world, per_host; /* see zs_comm */
} zs_ranks_of_hosts;

/* ZS_ERR_VALUE where they are not possible. */
zs_status zs_check_ranks_of_hosts(const zs_ranks_of_hosts *ranks);

/* A transport that stands for another, of so many ranks, where only sizes are asked for: it has no peers and no memory.
 * ZS_ERR_VALUE for an unknown name. */
zs_status zs_comm_dry_new(const char *name, const zs_ranks_of_hosts *ranks, zs_comm **out);

/* World of one, with flats and buckets on `device`; every call is a no-op or a copy. */
zs_status zs_comm_self_new(const zs_device *device, zs_comm **out);

/* --- shm: one step at a time, because addresses travel over torch's store in between ------------------------------ */

/* What a rank needs to be one of `world`, besides memory. Flats and buckets come on top: a flat is up to three
 * mappings (the own shard, and what lies before and behind it), and each bucket is a mapping of all ranks that
 * reduce. */
typedef struct zs_shm_needs {
    size_t descriptors, meeting; /* file descriptors; and so many while the ranks meet */
    size_t mappings;
    size_t bytes; /* of address space */
} zs_shm_needs;
zs_shm_needs zs_comm_shm_needs(int world);

/* Opens a listening socket with a fresh abstract name, makes the memory files; `address` (size >= 108) gets the name.
 * ZS_ERR_UNSUPPORTED if a limit of the process is too low for so many ranks, before anything is made. */
zs_status zs_comm_shm_new(int rank, int world, double timeout, char *address, size_t size, zs_comm **out);

/* Connects to all peers: `addresses` [world] as they were given out, `token` 16 bytes equal on all ranks. Exchanges
 * memory files and pidfds. A failure leaves the comm fit only for release (the caller then falls back to c10d). */
zs_status zs_comm_shm_connect(zs_comm *comm, const char *const *addresses, const unsigned char token[16]);

/* --- c10d --------------------------------------------------------------------------------------------------------- */

/* Over the process group that torch registered under `group_name`; resolved in torch_c10d.cpp. */
zs_status zs_comm_c10d_new(const char *group_name, const zs_ranks_of_hosts *ranks, double timeout, zs_comm **out);

/* --- hosts: in two levels ----------------------------------------------------------------------------------------- */

/* The process groups that it uses: of all ranks, and two of the ranks that stand at this rank's place on their
 * hosts, for what hosts with even and with odd numbers send. */
typedef struct zs_hosts_groups {
    const char *all, *across[2];
} zs_hosts_groups;

/* `local` (which gets a reference, and serves nothing else) is the transport of this host's ranks. */
zs_status zs_comm_hosts_new(const zs_hosts_groups *groups, zs_comm *local, const zs_ranks_of_hosts *ranks,
                            double timeout, zs_comm **out);

/* --- GPUs --------------------------------------------------------------------------------------------------------- */

struct zs_backend;

/* Flats and buckets on the backend's device; `backend` (backend.h) is taken over, whatever comes of it. `control`
 * (which gets a reference) is a transport between the hosts of the same ranks, and goes on to be usable for itself. */
zs_status zs_comm_gpu_new(zs_comm *control, struct zs_backend *backend, zs_comm **out);

#endif
