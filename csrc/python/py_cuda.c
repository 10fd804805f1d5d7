/* py_cuda.c - facts of this machine for Python: the chosen loops, the kernels, the CUDA driver and its GPUs. */
#include "python/py_util.h"

#include "base/simd.h"
#include "device/cuda_driver.h"
#include "device/cuda_image.h"

/* One GPU, or an exception. */
static PyObject *gpu(int ordinal)
{
    zs_cuda_device device;
    zs_clear_error();
    if (zs_cuda_describe_device(ordinal, &device) != ZS_OK) return zs_py_raise(NULL);
    return Py_BuildValue("{s:s,s:(ii),s:i}", "name", device.name, "capability", device.major, device.minor,
                         "multiprocessors", device.multiprocessors);
}

static PyObject *gpus(int n)
{
    PyObject *list = PyList_New(n);
    for (int i = 0; list != NULL && i < n; i++) {
        PyObject *one = gpu(i);
        if (one == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, one);
    }
    return list;
}

static PyObject *build(PyObject *module, PyObject *unused)
{
    static const char *const sets[ZS_ISA_COUNT] = {"base", "avx2", "avx512"};
    const char *variant = "debug";
    (void)module;
    (void)unused;
#if defined(__SANITIZE_ADDRESS__)
    variant = "sanitize";
#elif defined(NDEBUG)
    variant = "release";
#endif
    return Py_BuildValue("(ss)", sets[zs_isa_best()], variant);
}

static PyObject *machine(PyObject *module, PyObject *unused)
{
    zs_cuda_info info;
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    zs_cuda_describe(&info);
    Py_END_ALLOW_THREADS
    PyObject *list = gpus(info.words[0] == '\0' ? info.devices : 0);
    if (list == NULL) return NULL;
    return Py_BuildValue("{s:s,s:i,s:s,s:i,s:s,s:N}", "targets", zs_cuda_image_targets(), "built",
                         zs_cuda_image_version(), "driver", info.path, "version", info.version, "problem", info.words,
                         "gpus", list);
}

static PyMethodDef functions[] = {
    {"build", build, METH_NOARGS,
     "build($module, /)\n--\n\nReturn the instruction set of the CPU kernels, and the variant of the build."},
    {"machine", machine, METH_NOARGS,
     "machine($module, /)\n--\n\nDescribe the machine in a dict: "
     "targets (the GPU architectures the CUDA kernels were compiled for), built (the CUDA version they were compiled "
     "with: 13000 is 13.0, 0 means no kernels), driver and version (the CUDA driver), problem (why the driver is "
     "unavailable, else \"\") and gpus."},
    {0},
};

int zs_py_cuda_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
