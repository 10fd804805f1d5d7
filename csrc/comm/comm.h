/* comm.h - exchanges bytes between ranks: tables of functions (comm_ops.h), one implementation per transport.
 *
 * A unit never names a transport. It allocates memory that the transport can share (flats and buckets), posts a full
 * bucket, later collects pointers to all ranks' gradients of its shard, sums them (in rank order) and releases them. On
 * `shm` the pointers lead straight into the peers' memory and nothing is copied; on `c10d` they lead into a receive
 * buffer. If a transport can map all ranks' shards side by side (shm), the mapping *is* the full buffer: an unshard
 * moves no bytes.
 *
 *   flat    memory of one dtype of a unit: this rank's shard and, if mapped, the full buffer
 *   bucket  full-size gradient memory that peers can read
 *   cunit   the transport's state of a unit: its number (the same on all ranks), shard sizes, its round (round.h)
 *   reader  a model's right to read the peers' shards: opened at a root forward or backward, closed at its end
 *
 * Rules for every transport: one thread calls at a time. A wait fails at the deadline (timeout), or within seconds
 * after a peer died, with ZS_ERR_TIMEOUT / ZS_ERR_PEER and a message that names the rank and the operation that
 * waited; nothing blocks without both checks. */
#ifndef ZS_COMM_H
#define ZS_COMM_H

#include "comm/comm_ops.h"

/* Adds a reference; returns `comm`. */
zs_comm *zs_comm_retain(zs_comm *comm);

/* Drops a reference; the last one closes and frees the transport. NULL allowed. */
void zs_comm_release(zs_comm *comm);

/* Makes every wait of every transport that can (shm) call `interrupted` about ten times a second. If it returns
 * true, the wait fails with ZS_ERR_TORCH (`interrupted` has set a Python exception, such as KeyboardInterrupt).
 * NULL: no hook. */
void zs_comm_on_wait(bool (*interrupted)(void));

/* Do peers map this rank's memory? */
bool zs_comm_shares_memory(const zs_comm *comm);

/* Before this rank exits: waits until the ranks that caused the failure have exited, for at most `seconds`. */
void zs_comm_outlive(zs_comm *comm, double seconds);

/* Has a rank reported that it cannot continue, while all ranks are still running? */
bool zs_comm_is_stopped(zs_comm *comm);

/* gather_start, then gather_finish. */
zs_status zs_comm_gather(zs_comm *comm, const zs_flat_mem *flat, const char *unit, zs_target to);

/* Makes all ranks number from here on in the same way: some may have failed where others created a model. What failed
 * before is forgotten. Collective. */
zs_status zs_comm_align(zs_comm *comm);

/* The unit's name in messages: "(root)" for the outermost, whose name is empty; borrowed. */
const char *zs_unit_label(const char *name);

/* Records an event of a model's parameters on this rank that must happen on all ranks or on none: the fingerprint
 * `before` becomes `now`. It is compared with the peers' when ranks next gather parameters; if it differs, the
 * gather fails on all ranks with ZS_ERR_DIVERGED. `reader`: the model's, if this transport created it, else NULL.
 * Never waits. */
void zs_comm_publish_fingerprint(zs_comm *comm, zs_reader *reader, const zs_fingerprint *before,
                                 const zs_fingerprint *now);

/* Encodes a session for transports that send this with each gather; 0 is a training forward. */
uint64_t zs_reading_encode(const zs_reading *reading);

/* Do two of these belong to the same forward of all ranks? / Had the rank changed its parameters by hand? */
bool zs_reading_alike(uint64_t a, uint64_t b);
bool zs_reading_changed(uint64_t reading);

/* Does it belong to a backward / to a forward that no backward follows? */
bool zs_reading_is_backward(uint64_t reading);
bool zs_reading_is_look(uint64_t reading);

/* Fails because ranks do not run the same forward, and rank `changed` has changed its parameters by hand. */
zs_status zs_comm_fail_apart(const zs_comm *comm, int changed);

/* `near` is between some of the ranks, on one host. If a rank waits there for one whose wait in `comm` fails, it gets
 * the reason from that rank, and waits long enough for it. `near` may be `comm` itself: then this does nothing. */
void zs_comm_set_near(zs_comm *comm, zs_comm *near);

/* This rank's number, and how the ranks are spread over hosts. */
typedef struct zs_ranks_of_hosts {
    int rank, world, per_host; /* see zs_comm */
} zs_ranks_of_hosts;

/* ZS_ERR_VALUE if they are not possible. */
zs_status zs_check_ranks_of_hosts(const zs_ranks_of_hosts *ranks);

/* *new* fake of the transport `name` with that many ranks, for plans that only need sizes: it has no peers and no
 * memory. ZS_ERR_VALUE for an unknown name. */
zs_status zs_comm_dry_new(const char *name, const zs_ranks_of_hosts *ranks, zs_comm **out);

/* World of one, with flats and buckets on `device`; every call is a no-op or a copy. */
zs_status zs_comm_self_new(const zs_device *device, zs_comm **out);

/* --- shm: in two steps, because torch's store carries the addresses in between ------------------------------------ */

/* A rank's needs, besides memory, to be one of `world`. Flats and buckets add to this: a flat is up to three mappings
 * (this rank's shard, and the memory before and after it), and each bucket is mapped by all ranks that reduce. */
typedef struct zs_shm_needs {
    size_t descriptors, meeting; /* file descriptors; and while the ranks connect */
    size_t mappings;
    size_t bytes; /* address space */
} zs_shm_needs;
zs_shm_needs zs_comm_shm_needs(int world);

/* Opens a listening socket with a fresh abstract name, and creates the memory files; `address` (size >= 108) gets
 * the name. ZS_ERR_UNSUPPORTED, before anything is created, if a limit of the process is too low for this many
 * ranks. */
zs_status zs_comm_shm_new(int rank, int world, double timeout, char *address, size_t size, zs_comm **out);

/* Connects to all peers: `addresses` [world] are those of zs_comm_shm_new, `token` is 16 bytes equal on all ranks.
 * Exchanges memory files and pidfds. After a failure the comm can only be released (the caller then falls back to
 * c10d). */
zs_status zs_comm_shm_connect(zs_comm *comm, const char *const *addresses, const unsigned char token[16]);

/* --- c10d --------------------------------------------------------------------------------------------------------- */

/* Uses the process group that torch registered under `group_name`; resolved in torch_c10d.cpp. */
zs_status zs_comm_c10d_new(const char *group_name, const zs_ranks_of_hosts *ranks, double timeout, zs_comm **out);

/* --- hosts: in two levels ----------------------------------------------------------------------------------------- */

/* `group` is of all ranks. `fds` [2 * hosts], copied: for each host a socket that is connected to this rank's
 * counterpart there to send over, and one to receive from; -1 for this host.
 * `local` (adds a reference; it must serve nothing else) is the transport of this host's ranks. */
zs_status zs_comm_hosts_new(const char *group, const int *fds, zs_comm *local, const zs_ranks_of_hosts *ranks,
                            double timeout, zs_comm **out);

/* --- GPUs --------------------------------------------------------------------------------------------------------- */

struct zs_backend;

/* Flats and buckets are on the backend's device. *Steals* `backend` (backend.h), even if this fails. `control` (adds a
 * reference) is a transport between the same ranks' hosts; it stays usable. */
zs_status zs_comm_gpu_new(zs_comm *control, struct zs_backend *backend, zs_comm **out);

#endif
