/* tensor.h - the plain-C interface to torch. All that the core knows of tensors, storages and autograd is here.
 *
 * torch_shim.cpp is the only file that includes ATen; behind this interface a tensor is an opaque counted handle, every
 * call returns a zs_status, and no C++ exception escapes.
 *
 * Ownership words: *new* (caller frees), *borrowed* (valid while its source lives), *steals*. */
#ifndef ZS_TENSOR_H
#define ZS_TENSOR_H

#include "base/memory.h"
#include "base/status.h"

/* The element types that the core distinguishes. */
typedef enum zs_dtype { ZS_F32, ZS_F64, ZS_BF16, ZS_F16, ZS_BYTES } zs_dtype; /* ZS_BYTES: moved, never summed */

enum { ZS_MAX_DIM = 16 }; /* dimensions of a parameter, at most */

typedef struct zs_tensor zs_tensor;   /* a strong reference to an at::Tensor */
typedef struct zs_storage zs_storage; /* a strong reference to a c10::StorageImpl */

/* The kind of device that holds a tensor. */
typedef enum zs_device_type { ZS_ON_CPU, ZS_ON_CUDA, ZS_ON_META, ZS_ON_OTHER } zs_device_type;

typedef struct zs_where {
    zs_device_type type;
    int index; /* of the GPU; else 0 */
} zs_where;

/* Are they the same device? */
static inline bool zs_same_where(zs_where a, zs_where b)
{
    return a.type == b.type && a.index == b.index;
}

typedef struct zs_tensor_info {
    zs_dtype dtype;
    size_t itemsize;             /* bytes per element */
    int ndim;                    /* sizes and strides beyond ZS_MAX_DIM are left out */
    int64_t sizes[ZS_MAX_DIM];   /* elements */
    int64_t strides[ZS_MAX_DIM]; /* if `dense` */
    int64_t numel;
    zs_where where;
    bool contiguous; /* row-major */
    bool dense;      /* its elements, more than one, fill a range of memory, in any order of the dimensions */
    bool strided;    /* dense strided layout (not sparse, not quantized, not opaque) */
    bool requires_grad;
    bool is_leaf;
} zs_tensor_info;

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* *new* handle that does not keep the tensor alive. A unit holds its parameters this way, since they hold the unit
 * through their hooks. Before each use of a weak handle, check zs_tensor_alive. */
zs_tensor *zs_tensor_new_weak(const zs_tensor *tensor);

/* Is the tensor behind the handle alive? Always true of a strong handle. */
bool zs_tensor_alive(const zs_tensor *tensor);

/* Do both handles refer to the same tensor? */
bool zs_tensor_same(const zs_tensor *a, const zs_tensor *b);

/* Frees a handle; NULL allowed. */
void zs_tensor_free(zs_tensor *tensor);

/* Fills `info`. */
zs_status zs_tensor_describe(const zs_tensor *tensor, zs_tensor_info *info);

/* First element's address; ZS_ERR_TORCH (with torch's message) if the storage has no bytes. Borrowed. */
zs_status zs_tensor_data(const zs_tensor *tensor, void **data);

/* Copies elements [begin, begin + numel) of the tensor in row-major order, with any strides and from any device, to
 * `dst`, which is memory of `where`. */
zs_status zs_tensor_read(const zs_tensor *tensor, int64_t begin, int64_t numel, void *dst, zs_where where);

/* The reverse: copies all elements of the tensor from `src`, row-major memory on the tensor's device. Its version
 * stays. */
zs_status zs_tensor_write(const zs_tensor *tensor, const void *src);

/* The block under a tensor whose storage zs_storage_fill filled, else NULL. Borrowed. */
zs_mem *zs_tensor_mem(const zs_tensor *tensor);

/* Raises the version counter, as an in-place write by torch would. */
void zs_tensor_bump_version(const zs_tensor *tensor);

/* Does anything but the owner of this handle hold the tensor, such as a script's variable? For a strong handle of a
 * tensor that is no .grad. */
bool zs_tensor_is_kept(const zs_tensor *tensor);

/* Does the tensor require a gradient? */
bool zs_tensor_requires_grad(const zs_tensor *tensor);

/* Do its gradients have its own dtype? They do unless a script has set `grad_dtype`. */
bool zs_tensor_has_own_grad_dtype(const zs_tensor *tensor);

/* The current version; 0 for tensors without one (created under inference mode). */
uint32_t zs_tensor_version(const zs_tensor *tensor);

/* --- storages: one per flat for life; its bytes change ------------------------------------------------------------ */

/* *new* storage of `bytes` of `where` that has no bytes yet; an access raises `message`. */
zs_status zs_storage_new(zs_where where, size_t bytes, const char *message, zs_storage **out);

/* Frees the reference; NULL allowed. */
void zs_storage_free(zs_storage *storage);

/* Number of tensors and handles that share the storage, plus Python's object of it while a script holds that. */
int64_t zs_storage_users(const zs_storage *storage);

/* Sets the storage's bytes: `data` within `mem`, to which the storage adds a reference. */
zs_status zs_storage_fill(zs_storage *storage, zs_mem *mem, void *data);

/* Removes the bytes; from now on an access raises the RuntimeError `message`. */
zs_status zs_storage_clear(zs_storage *storage, const char *message);

/* The place of a tensor's elements. */
typedef struct zs_place {
    const zs_storage *storage;
    int64_t offset; /* first element */
    int ndim;
    const int64_t *sizes;
    zs_dtype dtype;         /* ZS_BYTES: the tensor's own */
    const int64_t *strides; /* NULL: row-major */
} zs_place;

/* Moves a tensor to a place. Its identity, autograd state, hooks and version stay. */
zs_status zs_tensor_bind(zs_tensor *tensor, const zs_place *place);

/* *new* tensor there, of `like`'s dtype unless the place sets one, without autograd history. */
zs_status zs_tensor_new_on(const zs_place *place, const zs_tensor *like, zs_tensor **out);

/* *new* row-major tensor of `like`'s dtype and device, on a new storage that begins at `data` within `mem`. */
static inline zs_status zs_tensor_new_in(zs_mem *mem, void *data, int ndim, const int64_t *sizes, const zs_tensor *like,
                                         zs_tensor **out)
{
    zs_tensor_info info;
    zs_storage *storage = NULL;
    ZS_TRY(zs_tensor_describe(like, &info));
    size_t bytes = info.itemsize;
    for (int d = 0; d < ndim; d++)
        bytes *= (size_t)sizes[d];
    zs_place place = {NULL, 0, ndim, sizes, ZS_BYTES, NULL};
    zs_status status = zs_storage_new(info.where, bytes, "", &storage);
    ZS_THEN(status, zs_storage_fill(storage, mem, data));
    place.storage = storage;
    ZS_THEN(status, zs_tensor_new_on(&place, like, out));
    zs_storage_free(storage);
    return status;
}

/* Is the tensor on this storage? False after `p.data = other`. */
bool zs_tensor_on_storage(const zs_tensor *tensor, const zs_storage *storage);

/* Is it at this place, as after zs_tensor_bind? */
bool zs_tensor_lies_at(const zs_tensor *tensor, const zs_place *place);

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Properties of tensor.grad, without touching Python. */
typedef struct zs_grad_info {
    bool defined; /* is there a grad? */
    zs_dtype dtype;
    int64_t numel;
    bool dense; /* contiguous, strided */
    zs_where where;
    void *data;       /* borrowed: first element if dense, else NULL */
    zs_mem *mem;      /* borrowed: as zs_tensor_mem */
    uint32_t version; /* torch's count of changes in place; 0 for an inference tensor */
} zs_grad_info;

/* Fills `info` from tensor.grad. */
zs_status zs_grad_describe(const zs_tensor *tensor, zs_grad_info *info);

/* Copies tensor.grad (any strides, sparse too), row-major and cast to `dtype`, to `dst`; with `add`, adds it there. */
zs_status zs_grad_copy(const zs_tensor *tensor, void *dst, zs_dtype dtype, bool add);

/* Casts tensor.grad, if there is one, to `dtype`: a new tensor, unless it has it. */
zs_status zs_grad_cast(zs_tensor *tensor, zs_dtype dtype);

/* Is tensor.grad this very tensor? */
zs_status zs_grad_is(const zs_tensor *tensor, const zs_tensor *grad, bool *same);

/* tensor.grad = `grad` (shares the tensor; its shape is not checked). NULL: None. */
zs_status zs_grad_set(zs_tensor *tensor, const zs_tensor *grad);

/* --- autograd hooks: run without the GIL, hold a reference to their context --------------------------------------- */

typedef struct zs_hook {
    zs_status (*call)(void *ctx, int64_t arg); /* a failure becomes a Python exception raised by backward() */
    void (*retain)(void *ctx);
    void (*release)(void *ctx);
    void *ctx;
    int64_t arg;
} zs_hook;

/* Makes torch run `hook` after it accumulates each gradient of the leaf `tensor`. A hook that is already in torch's
 * single slot (a user's Python one) is kept, and zs_hook_run_users runs it. Cheap if ours is already there: call it
 * at every bind, as this also gives torch's gradient node of a tensor its new shape. */
zs_status zs_hook_grad_ready(zs_tensor *tensor, const zs_hook *hook);

/* Removes our hook and restores the user's. */
zs_status zs_hook_grad_remove(zs_tensor *tensor);

/* Runs the user's post-accumulate hook that zs_hook_grad_ready kept, if any. */
zs_status zs_hook_run_users(zs_tensor *tensor);

/* Does this user hook slot have anything to run? */
bool zs_hook_has_users(const zs_tensor *tensor);

/* The hook's `arg` if its backward raised. */
enum { ZS_BACKWARD_ABANDONED = -1 };

/* Makes torch run `hook` once at the end of the backward that is running on this thread; if that raises instead, the
 * hook runs with ZS_BACKWARD_ABANDONED when torch drops the backward, and its status is ignored. */
zs_status zs_hook_backward_end(const zs_hook *hook);

/* In that hook, with ZS_BACKWARD_ABANDONED: the backward's exception, as "ValueError: text"; "" if unknown; belongs to
 * this thread, valid until the next. */
const char *zs_backward_failure(void);

/* Is a backward running on this thread? */
bool zs_in_backward(void);

/* Is autograd recording on this thread? */
bool zs_grad_mode(void);

/* The number of the next node that this thread creates; numbers only grow. */
int64_t zs_next_node(void);

/* This thread's number in autograd; nodes remember it. */
uint64_t zs_node_thread(void);

typedef struct zs_node zs_node; /* a node of autograd's graph; borrowed */

/* A node in a walk. Nodes that only accumulate a gradient are left out. */
typedef struct zs_node_at {
    uint64_t thread; /* that created it, see zs_node_thread */
    int64_t number;  /* as zs_next_node returned before */
    int64_t place;   /* the visitor's result */
} zs_node_at;

/* The visitor of a graph: each function gets `ctx`. */
typedef struct zs_graph_visitor {
    void *ctx;
    int64_t (*place)(void *ctx, uint64_t thread, int64_t number); /* called once for each node; negative: no place */
    /* A backward edge leads to a node of another place than the node it comes from; `from` is NULL for a root. */
    zs_status (*edge)(void *ctx, const zs_node_at *from, const zs_node_at *to, zs_node *node);
} zs_graph_visitor;

/* Makes torch run `hook` before each backward of that node; no-op if it already does. */
zs_status zs_hook_node(zs_node *node, const zs_hook *hook);

/* --- autocast ----------------------------------------------------------------------------------------------------- */

/* Drops the casts of parameters that torch.autocast keeps until its context ends, in all threads; they are made
 * again when needed. Costs almost nothing if there are none. */
void zs_autocast_forget(void);

/* --- torch's thread pool ------------------------------------------------------------------------------------------ */

/* Runs fn(ctx, begin, end) over [0, n) in pieces of at least `grain` on torch's intra-op threads; returns when done. */
void zs_parallel_for(int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end), void *ctx);

/* --- process groups (torch_c10d.cpp) ------------------------------------------------------------------------------ */

typedef struct zs_group zs_group;

/* *new* handle to the process group registered under `name`. */
zs_status zs_group_new(const char *name, zs_group **out);

/* Frees it; NULL allowed. */
void zs_group_free(zs_group *group);

/* Sets the memory that the calls below take: of `where`, which the process group must support; initially the CPU's. */
void zs_group_on(zs_group *group, zs_where where);

/* Sets how long each of the calls below may take from now on. After that they fail with ZS_ERR_TIMEOUT, with
 * ZS_ERR_PEER if a rank has exited, else with ZS_ERR_TORCH; all with the process group's message. */
void zs_group_set_timeout(zs_group *group, double seconds);

typedef struct zs_work zs_work; /* a collective in flight */

/* Each of these starts a collective; the memory must not change until zs_work_wait reports the end. all_to_all:
 * piece r of `in` goes to rank r; `out` gets rank r's piece at r * piece_bytes. all_gather: `out` (world * bytes)
 * gets every rank's `in`, which may be its own place in `out`. broadcast: `data` of `root` to all. */
zs_status zs_group_all_to_all(zs_group *group, const void *in, void *out, size_t piece_bytes, int world,
                              zs_work **work);
zs_status zs_group_all_gather(zs_group *group, const void *in, void *out, size_t bytes, int world, zs_work **work);
zs_status zs_group_broadcast(zs_group *group, void *data, size_t bytes, int root, zs_work **work);

/* Does the group support messages in addition to collectives, on any thread? (gloo) */
bool zs_group_has_messages(const zs_group *group);

/* Sends or receives a message of `bytes`, to or from one rank. Messages from one rank to another arrive in order. */
zs_status zs_group_send(zs_group *group, const void *data, size_t bytes, int to, zs_work **work);
zs_status zs_group_receive(zs_group *group, void *data, size_t bytes, int from, zs_work **work);

/* Waits for a message to be received, without a deadline. False: it will not come, because the sender exited (which
 * leaves a record), or because zs_work_abort was called, now or before. */
bool zs_work_await(zs_work *work);
void zs_work_abort(zs_work *work);

/* This rank cannot continue: closes all connections of the group on which `work` was to be received, so that the
 * peers notice. */
void zs_work_hang_up(zs_work *work);

/* Has it ended, well or not? */
bool zs_work_done(const zs_work *work);

/* Waits up to `seconds` for its end; sets `done` if it ended, and then returns its result. (Process groups other
 * than gloo cannot wait with a limit: then this returns only at the end.) */
zs_status zs_work_wait(zs_work *work, double seconds, bool *done);

/* Frees the handle of a finished collective, or of a message; torch no longer uses its memory. */
void zs_work_free(zs_work *work);

/* Writes a text for the other ranks to the group's store; fails silently, as the store may be down too. */
void zs_group_publish_text(zs_group *group, int rank, const char *reason);

/* Asks all ranks where their scripts are, through the group's store; returns the number of the question, 0: there is
 * no store. */
uint64_t zs_group_ask_positions(zs_group *group);

/* Reads the answer of `rank`; leaves `text` unchanged if there is none, or if the store is down. */
void zs_group_read_answer(zs_group *group, uint64_t number, int rank, char *text, size_t size);

/* Writes this rank's page of `pages` [world * bytes] to the group's store. True for the last rank to do so, which
 * then has all pages. False also if the store is down. */
bool zs_group_leave_page(zs_group *group, int rank, int world, void *pages, size_t bytes);

/* Reads the text that `rank` wrote there; "" if none. */
void zs_group_read_text(zs_group *group, int rank, char *reason, size_t size);

#endif
