/* CUDA's driver on a machine without a device, for cuDNN to make plans with: modules load, and nothing runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { SUCCESS = 0, NO_DEVICE = 100 };

static int no_device(void) { return NO_DEVICE; }

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
int cuGetErrorName(int error, const char **name) { *name = "NO_DEVICE"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return SUCCESS; }

/* Handles that nobody follows. */
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return SUCCESS; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
    return cuModuleLoadData(module, image);
}
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)2; return SUCCESS; }
int cuModuleUnload(void *module) { return SUCCESS; }
int cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *library = (void *)3;
    return SUCCESS;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = (void *)4; return SUCCESS; }
int cuLibraryUnload(void *library) { return SUCCESS; }
int cuKernelGetFunction(void **function, void *kernel) { *function = (void *)5; return SUCCESS; }

/* Functions that cuDNN looks up before it makes a plan, and does not call. */
#define FUNCTION(name) int name(void) { return NO_DEVICE; }
FUNCTION(cuCtxGetCurrent)
FUNCTION(cuCtxGetDevice)
FUNCTION(cuCtxGetLimit)
FUNCTION(cuCtxPopCurrent)
FUNCTION(cuCtxPushCurrent)
FUNCTION(cuDeviceGet)
FUNCTION(cuDeviceGetAttribute)
FUNCTION(cuFuncGetAttribute)
FUNCTION(cuFuncSetAttribute)
FUNCTION(cuGetExportTable)
FUNCTION(cuKernelGetAttribute)
FUNCTION(cuKernelSetAttribute)
FUNCTION(cuLaunchCooperativeKernel)
FUNCTION(cuLaunchKernel)
FUNCTION(cuLaunchKernelEx)
FUNCTION(cuLibraryLoadFromFile)
FUNCTION(cuLinkAddData)
FUNCTION(cuLinkComplete)
FUNCTION(cuLinkCreate)
FUNCTION(cuLinkDestroy)
FUNCTION(cuModuleGetGlobal)
FUNCTION(cuModuleGetGlobal_v2)
FUNCTION(cuOccupancyMaxPotentialClusterSize)
FUNCTION(cuStreamGetCtx)

/* What is not here says that there is no device. */
int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    void *own = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void *found = own ? dlsym(own, name) : NULL;
    *function = found ? found : (void *)no_device;
    return SUCCESS;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    if (status) *status = 0;
    return cuGetProcAddress(name, function, version, flags);
}
