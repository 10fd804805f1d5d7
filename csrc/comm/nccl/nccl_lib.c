/* nccl_lib.c - see nccl_lib.h.
 *
 * A process has one NCCL. A second copy would have its own threads and connections, and its own map of GPUs to ranks;
 * so a loaded NCCL, such as torch's, precedes every path but one that the user sets. */
#define _GNU_SOURCE 1 /* RTLD_NOLOAD, dladdr */
#include "comm/nccl/nccl_lib.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char soname[] = "libnccl.so.2";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char known_path[512]; /* of Python's package */
static zs_nccl table;
static bool loaded;

zs_status zs_nccl_set_path(const char *path)
{
    if (path == NULL) path = "";
    if (strlen(path) >= sizeof known_path)
        return ZS_FAIL(ZS_ERR_VALUE, "the path of libnccl is %zu bytes long; the limit is %zu", strlen(path),
                       sizeof known_path - 1);
    pthread_mutex_lock(&lock);
    memcpy(known_path, path, strlen(path) + 1);
    pthread_mutex_unlock(&lock);
    return ZS_OK;
}

void zs_nccl_version_text(int version, char *text, size_t size)
{
    bool short_form = version < 10000; /* 2.8 and before: 2804 */
    int major = short_form ? version / 1000 : version / 10000;
    int minor = short_form ? version % 1000 / 100 : version % 10000 / 100;
    snprintf(text, size, "%d.%d.%d", major, minor, version % 100);
}

static const char *dl_words(void)
{
    const char *words = dlerror();
    return words != NULL ? words : "dlopen gave no reason";
}

/* dlopen; keeps the name for messages. */
static void *open_as(const char *name, int flags)
{
    snprintf(table.where, sizeof table.where, "%s", name);
    return dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);
}

/* Opens the first library of the search order. */
static zs_status open_library(void **out)
{
    const char *forced = getenv("ZSHARD_NCCL_LIB");
    if (forced != NULL && forced[0] != 0) {
        *out = open_as(forced, 0);
        if (*out == NULL)
            return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                           "NCCL: cannot load ZSHARD_NCCL_LIB: %s; unset it, or set it to a libnccl.so.2", dl_words());
        return ZS_OK;
    }
    *out = open_as(soname, RTLD_NOLOAD);
    if (*out == NULL && known_path[0] != 0) *out = open_as(known_path, 0);
    if (*out == NULL) *out = open_as(soname, 0);
    if (*out == NULL)
        return ZS_FAIL(ZS_ERR_UNSUPPORTED,
                       "NCCL: cannot find libnccl.so.2 (%s): install a CUDA build of torch, which includes it, or set "
                       "ZSHARD_NCCL_LIB to its path",
                       dl_words());
    return ZS_OK;
}

/* Replaces the requested name by the file that was found. */
static void note_file(void)
{
    void *symbol = NULL;
    Dl_info info;
    memcpy(&symbol, &table.GetErrorString, sizeof symbol);
    if (symbol != NULL && dladdr(symbol, &info) != 0 && info.dli_fname != NULL)
        snprintf(table.where, sizeof table.where, "%s", info.dli_fname);
}

/* Fills the table's pointers; returns the name of the first required one that is missing, or NULL. */
static const char *find_functions(void *library)
{
    const char *missing = NULL;
    void *symbol = NULL;
#define REQUIRED(result, name, parameters)                         \
    symbol = dlsym(library, "nccl" #name);                         \
    if (symbol == NULL && missing == NULL) missing = "nccl" #name; \
    memcpy(&table.name, &symbol, sizeof symbol); /* C has no cast for it */
#define OPTIONAL(result, name, parameters) \
    symbol = dlsym(library, "nccl" #name); \
    memcpy(&table.name, &symbol, sizeof symbol);
    ZS_NCCL_REQUIRED(REQUIRED)
    ZS_NCCL_OPTIONAL(OPTIONAL)
#undef REQUIRED
#undef OPTIONAL
    return missing;
}

/* The lock is held. */
static zs_status load(void)
{
    void *library = NULL;
    ZS_TRY(open_library(&library));
    const char *missing = find_functions(library);
    note_file();
    if (missing != NULL || table.GetVersion(&table.version) != ZS_NCCL_SUCCESS) {
        zs_status status =
            ZS_FAIL(ZS_ERR_UNSUPPORTED,
                    "NCCL: %s lacks %s: it is not libnccl, or is older than 2.14; install NCCL 2.14 or newer",
                    table.where, missing != NULL ? missing : "a working ncclGetVersion");
        dlclose(library);
        return status;
    }
    loaded = true;
    return ZS_OK;
}

zs_status zs_nccl_load(const zs_nccl **out)
{
    pthread_mutex_lock(&lock);
    zs_status status = loaded ? ZS_OK : load();
    pthread_mutex_unlock(&lock);
    *out = status == ZS_OK ? &table : NULL;
    return status;
}
