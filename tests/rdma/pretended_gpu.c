/* Fake driver of two GPUs for tests, with CUDA's function names. GPU memory is a memfd, so that other processes can map
 * it. Its addresses belong to inaccessible pages, so that an access as CPU memory crashes. A copy runs when a thread
 * waits for its stream, and not before. The variable PRETENDED_GPU_REFUSES names functions that fail, for example
 * "ipc_get,ipc_open,copy". pretended_refuse names further functions later. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801 };
enum { DEVICES = 2, MOST = 4096, PAGE = 4096 };

typedef struct {
  uint64_t at, id;
  size_t bytes, mapped;
  char *real;
  int fd, device, imported;
} Allocation;

typedef struct Op {
  uint64_t to, from;
  size_t bytes;
  struct Op *next;
} Op;

typedef struct {
  Op *first, *last;
} Stream;

typedef struct {
  unsigned char bytes[64];
} Handle;
typedef struct {
  int pid, fd, device;
  uint64_t bytes, id;
} Said; /* content of a handle */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation all[MOST];
static uint64_t next_id = 1;
static uint64_t counts[8];
static char refused[256], always[256];
static __thread int contexts[16];
static __thread int depth;
enum { COPIES, PINNED, IMPORTED, STREAMS, COPIED_BYTES };

static int refuses(const char *what) { return strstr(refused, what) != NULL || strstr(always, what) != NULL; }

void pretended_refuse(const char *what) { snprintf(refused, sizeof refused, "%s", what); }
uint64_t pretended_count(int which) { return counts[which]; }

static Allocation *find(uint64_t address, size_t bytes) {
  if (bytes == 0) bytes = 1; /* an address at the end of one allocation may begin the next */
  for (int i = 0; i < MOST; ++i) {
    Allocation *a = &all[i];
    if (a->at != 0 && a->at <= address && address - a->at + bytes <= a->bytes) return a;
  }
  return NULL;
}

static Allocation *add(int fd, size_t bytes, int device, uint64_t id, int imported) {
  size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
  char *real = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  char *at = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (real == MAP_FAILED || at == MAP_FAILED) return NULL;
  for (int i = 0; i < MOST; ++i) {
    if (all[i].at != 0) continue;
    all[i] = (Allocation){(uint64_t)at, id, bytes, mapped, real, fd, device, imported};
    return &all[i];
  }
  return NULL;
}

static void drop(Allocation *a) {
  munmap(a->real, a->mapped);
  munmap((void *)a->at, a->mapped);
  if (a->fd >= 0) close(a->fd);
  a->at = 0;
}

uint64_t pretended_allocate(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fd = memfd_create("pretended_gpu", MFD_CLOEXEC);
  uint64_t at = 0;
  if (fd >= 0 && ftruncate(fd, (bytes + PAGE - 1) / PAGE * PAGE) == 0) {
    Allocation *a = add(fd, bytes, device, next_id++, 0);
    at = a == NULL ? 0 : a->at;
  }
  pthread_mutex_unlock(&lock);
  return at;
}

void pretended_free(uint64_t address) {
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  if (a != NULL) drop(a);
  pthread_mutex_unlock(&lock);
}

static char *real_of(uint64_t address, size_t bytes) {
  Allocation *a = find(address, bytes);
  return a == NULL ? NULL : a->real + (address - a->at);
}

int pretended_put(uint64_t to, const void *from, size_t bytes) {
  pthread_mutex_lock(&lock);
  char *real = real_of(to, bytes);
  if (real != NULL) memcpy(real, from, bytes);
  pthread_mutex_unlock(&lock);
  return real != NULL;
}

int pretended_get(void *to, uint64_t from, size_t bytes) {
  pthread_mutex_lock(&lock);
  char *real = real_of(from, bytes);
  if (real != NULL) memcpy(to, real, bytes);
  pthread_mutex_unlock(&lock);
  return real != NULL;
}

/* Return the descriptor of an allocation. It stands for what torch shares when the driver refuses to export. */
int pretended_share(uint64_t address, uint64_t *at, uint64_t *bytes) {
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  if (a != NULL) *at = a->at, *bytes = a->bytes;
  int fd = a == NULL ? -1 : a->fd;
  pthread_mutex_unlock(&lock);
  return fd;
}

uint64_t pretended_adopt(int pid, int number, uint64_t bytes) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, number);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 0;
  pthread_mutex_lock(&lock);
  Allocation *a = add(fd, bytes, 0, next_id++, 1);
  uint64_t at = a == NULL ? 0 : a->at;
  if (a != NULL) a->fd = -1;
  pthread_mutex_unlock(&lock);
  close(fd);
  return at;
}

/* ---- the driver's own functions */

int cuInit(unsigned flags) {
  (void)flags;
  const char *asked = getenv("PRETENDED_GPU_REFUSES");
  if (asked != NULL) snprintf(always, sizeof always, "%s", asked);
  return refuses("init") ? 100 : OK;
}

int cuGetErrorString(int result, const char **text) {
  *text = result == INVALID_CONTEXT ? "invalid device context" : result == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "a pretended error";
  return OK;
}

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= DEVICES) return INVALID_VALUE;
  *device = ordinal;
  return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(intptr_t)(device + 1);
  return OK;
}

int cuCtxPushCurrent_v2(void *context) {
  if (depth == 16) return INVALID_CONTEXT;
  contexts[depth++] = (int)(intptr_t)context;
  return OK;
}

int cuCtxPopCurrent_v2(void **context) {
  if (depth == 0) return INVALID_CONTEXT;
  *context = (void *)(intptr_t)contexts[--depth];
  return OK;
}

int cuPointerGetAttribute(void *value, int which, uint64_t address) {
  if (depth == 0 && refuses("attribute")) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  int result = a == NULL ? INVALID_VALUE : OK;
  if (a != NULL && which == 2) *(unsigned *)value = 2;
  if (a != NULL && which == 7) *(unsigned long long *)value = a->id;
  if (a != NULL && which == 9) *(int *)value = a->device;
  pthread_mutex_unlock(&lock);
  return result;
}

int cuMemGetAddressRange_v2(uint64_t *at, size_t *bytes, uint64_t address) {
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  if (a != NULL) *at = a->at, *bytes = a->bytes;
  pthread_mutex_unlock(&lock);
  return a == NULL ? INVALID_VALUE : OK;
}

int cuStreamCreate(void **stream, unsigned flags) {
  (void)flags;
  if (depth == 0) return INVALID_CONTEXT;
  *stream = calloc(1, sizeof(Stream));
  __atomic_add_fetch(&counts[STREAMS], 1, __ATOMIC_SEQ_CST);
  return OK;
}

int cuStreamDestroy_v2(void *stream) {
  free(stream);
  __atomic_sub_fetch(&counts[STREAMS], 1, __ATOMIC_SEQ_CST);
  return OK;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *opaque) {
  if (depth == 0) return INVALID_CONTEXT;
  if (refuses("copy")) return ILLEGAL_ADDRESS;
  Stream *stream = opaque;
  Op *op = malloc(sizeof *op);
  *op = (Op){to, from, bytes, NULL};
  if (stream->last != NULL) stream->last->next = op;
  else stream->first = op;
  stream->last = op;
  return OK;
}

/* Run one copy. An address that is not GPU memory is memory of this process, as with a real GPU. Copies run one at a
 * time, so that a race detector reports only races on host memory. */
static int run(const Op *op) {
  pthread_mutex_lock(&lock);
  char *to = real_of(op->to, op->bytes), *from = real_of(op->from, op->bytes);
  int known = to != NULL || from != NULL;
  if (known) memmove(to != NULL ? to : (char *)op->to, from != NULL ? from : (char *)op->from, op->bytes);
  pthread_mutex_unlock(&lock);
  if (!known) return ILLEGAL_ADDRESS;
  __atomic_add_fetch(&counts[COPIES], 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&counts[COPIED_BYTES], op->bytes, __ATOMIC_SEQ_CST);
  return OK;
}

int cuStreamSynchronize(void *opaque) {
  if (depth == 0) return INVALID_CONTEXT;
  if ((uintptr_t)opaque <= 2) return refuses("settle") ? ILLEGAL_ADDRESS : OK; /* the legacy and the per-thread stream */
  int result = refuses("wait") ? ILLEGAL_ADDRESS : OK;
  Stream *stream = opaque;
  while (stream->first != NULL) {
    Op *op = stream->first;
    stream->first = op->next;
    if (result == OK) result = run(op);
    free(op);
  }
  stream->last = NULL;
  return result;
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  (void)flags;
  if (depth == 0) return INVALID_CONTEXT;
  if (refuses("pinned")) return OUT_OF_MEMORY;
  *address = malloc(bytes);
  __atomic_add_fetch(&counts[PINNED], 1, __ATOMIC_SEQ_CST);
  return OK;
}

int cuMemFreeHost(void *address) {
  free(address);
  __atomic_sub_fetch(&counts[PINNED], 1, __ATOMIC_SEQ_CST);
  return OK;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  if (depth == 0) return INVALID_CONTEXT;
  if (refuses("ipc_get")) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  if (a != NULL && a->at == address) {
    Said said = {getpid(), a->fd, a->device, a->bytes, a->id};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &said, sizeof said);
  }
  pthread_mutex_unlock(&lock);
  return a == NULL || a->at != address ? INVALID_VALUE : OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
  (void)flags;
  Said said;
  memcpy(&said, &handle, sizeof said);
  if (depth == 0 || said.pid == getpid()) return INVALID_CONTEXT;
  if (refuses("ipc_open")) return NOT_SUPPORTED;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", said.pid, said.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  Allocation *a = add(fd, said.bytes, contexts[depth - 1] - 1, said.id, 1);
  if (a != NULL) *address = a->at, a->fd = -1;
  pthread_mutex_unlock(&lock);
  close(fd);
  if (a != NULL) __atomic_add_fetch(&counts[IMPORTED], 1, __ATOMIC_SEQ_CST);
  return a == NULL ? OUT_OF_MEMORY : OK;
}

int cuIpcCloseMemHandle(uint64_t address) {
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  int closes = a != NULL && a->imported;
  if (closes) drop(a);
  pthread_mutex_unlock(&lock);
  if (closes) __atomic_sub_fetch(&counts[IMPORTED], 1, __ATOMIC_SEQ_CST);
  return closes ? OK : INVALID_VALUE;
}

int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t bytes, int type, unsigned long long flags) {
  (void)flags;
  if (depth == 0) return INVALID_CONTEXT;
  if (refuses("dma_buf") || type != 1) return NOT_SUPPORTED;
  if (address % PAGE != 0 || bytes % PAGE != 0) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  Allocation *a = find(address, 0);
  *(int *)handle = a == NULL ? -1 : fcntl(a->fd, F_DUPFD_CLOEXEC, 3);
  pthread_mutex_unlock(&lock);
  return a == NULL ? INVALID_VALUE : OK;
}
