/* nccl_lib.h - NVIDIA's libnccl as a table of functions, filled on first use.
 *
 * No header and no link. The library is opened at run time, so one build serves machines with any NCCL and with
 * none; the declarations here are the stable part of its ABI, and a test compares their types and numbers with a
 * real nccl.h. Entries that older versions lack are optional: NULL; check before use. */
#ifndef ZS_NCCL_LIB_H
#define ZS_NCCL_LIB_H

#include "base/status.h"

/* The types in the functions below. (The test that compares them with nccl.h substitutes the real ones.) */
#ifndef ZS_NCCL_REAL_TYPES
typedef int zs_nccl_result; /* one of the numbers below, or a newer one */
typedef int zs_nccl_type;
typedef void *zs_nccl_handle; /* ncclComm_t */
typedef void *zs_nccl_stream; /* cudaStream_t, which is a CUstream */

/* ncclUniqueId: where and how the ranks find each other. Passed by value. */
typedef struct zs_nccl_id {
    char bytes[128];
} zs_nccl_id;

/* ncclConfig_t of 2.27. A library reads as much of `size` bytes as it knows, and takes the rest as unset, so this
 * works with older and newer ones. */
typedef struct zs_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
    int cga_cluster_size;
    int min_ctas, max_ctas;
    const char *net_name;
    int split_share;
    int traffic_class;
    const char *comm_name;
    int collnet_enable;
    int cta_policy;
    int shrink_share;
    int nvls_ctas;
} zs_nccl_config;
#endif

enum {
    ZS_NCCL_SUCCESS = 0,
    ZS_NCCL_UNHANDLED_CUDA_ERROR = 1,
    ZS_NCCL_SYSTEM_ERROR = 2,
    ZS_NCCL_INTERNAL_ERROR = 3,
    ZS_NCCL_INVALID_ARGUMENT = 4,
    ZS_NCCL_INVALID_USAGE = 5,
    ZS_NCCL_REMOTE_ERROR = 6,
    ZS_NCCL_IN_PROGRESS = 7,
}; /* zs_nccl_result */
enum { ZS_NCCL_INT8 = 0 }; /* zs_nccl_type */

enum { ZS_NCCL_CONFIG_VERSION = 22700 }; /* of the struct above */
#define ZS_NCCL_CONFIG_MAGIC 0xcafebeefU
#define ZS_NCCL_CONFIG_UNSET INT32_MIN /* of an int in the config; of a pointer: NULL */

/* X(result, name without "nccl", parameters): available since 2.14, the first version with all of these. */
#define ZS_NCCL_REQUIRED(X)                                                                                         \
    X(zs_nccl_result, GetVersion, (int *))                                                                          \
    X(zs_nccl_result, GetUniqueId, (zs_nccl_id *))                                                                  \
    X(zs_nccl_result, CommInitRankConfig, (zs_nccl_handle *, int, zs_nccl_id, int, zs_nccl_config *))               \
    X(zs_nccl_result, CommFinalize, (zs_nccl_handle))                                                               \
    X(zs_nccl_result, CommDestroy, (zs_nccl_handle))                                                                \
    X(zs_nccl_result, CommAbort, (zs_nccl_handle))                                                                  \
    X(zs_nccl_result, CommGetAsyncError, (zs_nccl_handle, zs_nccl_result *))                                        \
    X(const char *, GetErrorString, (zs_nccl_result))                                                               \
    X(zs_nccl_result, AllGather, (const void *, void *, size_t, zs_nccl_type, zs_nccl_handle, zs_nccl_stream))      \
    X(zs_nccl_result, Broadcast, (const void *, void *, size_t, zs_nccl_type, int, zs_nccl_handle, zs_nccl_stream)) \
    X(zs_nccl_result, Send, (const void *, size_t, zs_nccl_type, int, zs_nccl_handle, zs_nccl_stream))              \
    X(zs_nccl_result, Recv, (void *, size_t, zs_nccl_type, int, zs_nccl_handle, zs_nccl_stream))                    \
    X(zs_nccl_result, GroupStart, (void))                                                                           \
    X(zs_nccl_result, GroupEnd, (void))

/* Entries that some libraries lack. */
#define ZS_NCCL_OPTIONAL(X) X(const char *, GetLastError, (zs_nccl_handle))

#define ZS_NCCL_FIELD(result, name, parameters) result(*name) parameters;

/* The table. */
typedef struct zs_nccl {
    int version;     /* 22809 is 2.28.9 */
    char where[512]; /* the file that was opened, for messages */
    ZS_NCCL_REQUIRED(ZS_NCCL_FIELD)
    ZS_NCCL_OPTIONAL(ZS_NCCL_FIELD)
} zs_nccl;

/* Sets where to look after the library that torch has loaded and before the system's: the file of Python's
 * nvidia.nccl package. Copied; NULL or "" for none. ZS_ERR_VALUE if it is too long. */
zs_status zs_nccl_set_path(const char *path);

/* The table; opens the library the first time. Tries ZSHARD_NCCL_LIB (a path; then nothing else), the libnccl.so.2
 * that is already loaded (torch's), the path that was set, then the system's. The library stays open forever.
 * ZS_ERR_UNSUPPORTED if there is none, or one that lacks a required function; the next call tries again. Any thread. */
zs_status zs_nccl_load(const zs_nccl **out);

/* Writes "2.28.9" to `text` (16 bytes or more). */
void zs_nccl_version_text(int version, char *text, size_t size);

#endif
