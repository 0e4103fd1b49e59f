// A stand-in for a vendor library with cuBLAS's C interface, computing on host memory, for tests.
//
// It checks its arguments as cuBLAS does, logs every call, fails on request, and notices a handle that two threads use
// at once. Options at compile time:
//   -DSTANDIN_RUNTIME     only xpu_wait (and the control functions): the vendor's runtime library
//   -DWITHOUT_WORKSPACE   no cublasSetWorkspace_v2
//   -DWITHOUT_GEMM        no cublasGemmStridedBatchedEx
//   -DNO_BF16             gemm knows no bf16
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

#define ADDRESS(pointer) ((unsigned long long)(uintptr_t)(pointer))  // printed with %llx: %p prints null as (nil)

// Guards everything down to the control functions, and what handles hold; never held while computing.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- The log

static char* text;
static size_t text_length, text_room;

// One line: the call, and " -> status" if it did not succeed. The lock is held.
static void record(int status, const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line - 32, format, arguments);
    va_end(arguments);
    size_t length = strlen(line);
    if (status != SUCCESS) length += (size_t)snprintf(line + length, 31, " -> %d", status);
    line[length++] = '\n';
    if (text_length + length + 1 > text_room) {
        text_room = 2 * text_room + 1024;
        text = realloc(text, text_room);
        if (text == NULL) abort();
    }
    memcpy(text + text_length, line, length);
    text_length += length;
    text[text_length] = 0;
}

// ---- Failures on request

static struct failure {
    const char* function;
    int status, times;
} failures[] = {
    {"cublasCreate_v2", 0, 0},   {"cublasDestroy_v2", 0, 0},      {"cublasSetStream_v2", 0, 0},
    {"cublasSetMathMode", 0, 0}, {"cublasSetWorkspace_v2", 0, 0}, {"cublasGemmStridedBatchedEx", 0, 0},
    {"xpu_wait", 0, 0},
};
enum { FUNCTIONS = sizeof failures / sizeof *failures };

static struct failure* failure_of(const char* function) {
    for (int i = 0; i < FUNCTIONS; i++)
        if (strcmp(failures[i].function, function) == 0) return &failures[i];
    abort();  // no such function
}

// The status this call was told to fail with, or SUCCESS. The lock is held.
static int injected(const char* function) {
    struct failure* failure = failure_of(function);
    if (failure->times == 0) return SUCCESS;
    failure->times--;
    return failure->status;
}

// ---- Handles. They are never freed: no address serves twice, so a stale handle is always told from a live one.

struct handle {
    struct handle* next;
    char name[16];
    bool alive;
    int busy;  // how many calls of gemm are inside
    void* stream;
};
static struct handle* handles;
static int created, overlaps, delay_us;

// ---- Control functions

void standin_reset(void) {
    pthread_mutex_lock(&lock);
    for (struct handle* h = handles; h != NULL; h = h->next) {
        h->alive = false;
        strcpy(h->name, "h?");
    }
    for (int i = 0; i < FUNCTIONS; i++) failures[i].times = 0;
    created = overlaps = delay_us = 0;
    text_length = 0;
    if (text != NULL) text[0] = 0;
    pthread_mutex_unlock(&lock);
}

void standin_fail(const char* function, int status, int times) {
    pthread_mutex_lock(&lock);
    struct failure* failure = failure_of(function);
    failure->status = status;
    failure->times = times;
    pthread_mutex_unlock(&lock);
}

// A copy, which lives until this thread asks again: other threads may go on writing.
const char* standin_log(void) {
    static _Thread_local char* copy;
    pthread_mutex_lock(&lock);
    free(copy);
    copy = calloc(text_length + 1, 1);
    if (copy == NULL) abort();
    if (text_length > 0) memcpy(copy, text, text_length);
    pthread_mutex_unlock(&lock);
    return copy;
}

int standin_live_handles(void) {
    int live = 0;
    pthread_mutex_lock(&lock);
    for (struct handle* h = handles; h != NULL; h = h->next) live += h->alive;
    pthread_mutex_unlock(&lock);
    return live;
}

int standin_overlaps(void) {
    pthread_mutex_lock(&lock);
    int count = overlaps;
    pthread_mutex_unlock(&lock);
    return count;
}

void standin_set_delay(int us) {
    pthread_mutex_lock(&lock);
    delay_us = us;
    pthread_mutex_unlock(&lock);
}

#ifdef STANDIN_RUNTIME

int xpu_wait(void* stream) {
    pthread_mutex_lock(&lock);
    int status = injected("xpu_wait");
    record(status, "wait 0x%llx", ADDRESS(stream));
    pthread_mutex_unlock(&lock);
    return status;
}

#else

static struct handle* find(const void* handle) {
    struct handle* h = handles;
    while (h != NULL && h != handle) h = h->next;
    return h;
}

static const char* name(const struct handle* h) { return h == NULL ? "h?" : h->name; }

// What every function that takes a handle does first. The lock is held.
static int enter(const char* function, const void* handle, const struct handle* h) {
    int status = injected(function);
    if (status != SUCCESS) return status;
    if (handle == NULL) return INVALID_VALUE;
    if (h == NULL || !h->alive) return NOT_INITIALIZED;
    if (h->busy > 0) overlaps++;
    return SUCCESS;
}

int cublasCreate_v2(void** handle) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasCreate_v2");
    struct handle* h = NULL;
    if (status == SUCCESS && handle == NULL) status = INVALID_VALUE;
    if (status == SUCCESS && (h = calloc(1, sizeof *h)) == NULL) status = ALLOC_FAILED;
    if (status == SUCCESS) {
        snprintf(h->name, sizeof h->name, "h%d", ++created);
        h->alive = true;
        h->next = handles;
        *handle = handles = h;
    }
    record(status, h == NULL ? "create" : "create %s", name(h));
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasDestroy_v2(void* handle) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasDestroy_v2", handle, h);
    if (status == SUCCESS) h->alive = false;
    record(status, "destroy %s", name(h));
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasSetStream_v2(void* handle, void* stream) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetStream_v2", handle, h);
    if (status == SUCCESS) h->stream = stream;
    record(status, "set_stream %s 0x%llx", name(h), ADDRESS(stream));
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasSetMathMode(void* handle, int mode) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetMathMode", handle, h);
    int base = mode & ~16;  // 16: no reductions in reduced precision; 0 to 3: default, tensor op, pedantic, TF32
    if (status == SUCCESS && (base < 0 || base > 3)) status = INVALID_VALUE;
    record(status, "set_math_mode %s %d", name(h), mode);
    pthread_mutex_unlock(&lock);
    return status;
}

#ifndef WITHOUT_WORKSPACE
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetWorkspace_v2", handle, h);
    if (status == SUCCESS && workspace == NULL && bytes > 0) status = INVALID_VALUE;
    record(status, "set_workspace %s 0x%llx %zu", name(h), ADDRESS(workspace), bytes);
    pthread_mutex_unlock(&lock);
    return status;
}
#endif

#ifndef WITHOUT_GEMM

enum { R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

static double load(const void* data, int type, ptrdiff_t i) {
    if (type == R_32F) return ((const float*)data)[i];
    uint16_t bits = ((const uint16_t*)data)[i];
    if (type == R_16BF) {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? ldexp(fraction, -24)
                                  : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

// A finite x >= 0 as the 16 bits after the sign: rounded once, to nearest, ties to even. `fraction` bits follow the
// leading one; the smallest normal number is 2 to the power `lowest`, its predecessors are spaced as its successors.
static unsigned encode(double x, int fraction, int lowest) {
    int exponent = x == 0 || ilogb(x) < lowest ? lowest : ilogb(x);
    unsigned steps = (unsigned)nearbyint(ldexp(x, fraction - exponent));  // 2^fraction and more for normal numbers
    return ((unsigned)(exponent - lowest) << fraction) + steps;           // a carry moves on to the next exponent
}

static void store(void* data, int type, ptrdiff_t i, double x) {
    if (type == R_32F) {
        ((float*)data)[i] = (float)x;
        return;
    }
    // What follows the largest finite number, 2^16 or 2^128, has the bits of infinity: larger ones become that.
    unsigned bits = isnan(x)        ? 0x7fff
                    : type == R_16F ? encode(fmin(fabs(x), 0x1p16), 10, -14)
                                    : encode(fmin(fabs(x), 0x1p128), 7, -126);
    ((uint16_t*)data)[i] = (uint16_t)(bits | (signbit(x) ? 0x8000u : 0));
}

static bool type_known(int type) {
#ifdef NO_BF16
    if (type == R_16BF) return false;
#endif
    return type == R_32F || type == R_16F || type == R_16BF;
}

// `lines` lines of k elements, as doubles. Line i, element p is at i * line_step + p * step.
static void pack(double* to, const void* from, int type, int lines, int k, ptrdiff_t start, ptrdiff_t line_step,
                 ptrdiff_t step) {
    for (int i = 0; i < lines; i++)
        for (int p = 0; p < k; p++) *to++ = load(from, type, start + i * line_step + p * step);
}

int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                               const void* A, int Atype, int lda, long long strideA, const void* B, int Btype, int ldb,
                               long long strideB, const void* beta, void* C, int Ctype, int ldc, long long strideC,
                               int batch, int computeType, int algo) {
    bool empty = m == 0 || n == 0 || batch == 0;
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasGemmStridedBatchedEx", handle, h);
    if (status == SUCCESS &&
        (transa < 0 || transa > 2 || transb < 0 || transb > 2 || m < 0 || n < 0 || k < 0 || batch < 0 || lda < 1 ||
         lda < (transa ? k : m) || ldb < 1 || ldb < (transb ? n : k) || ldc < 1 || ldc < m || alpha == NULL ||
         beta == NULL || (!empty && (C == NULL || (k > 0 && (A == NULL || B == NULL))))))
        status = INVALID_VALUE;
    if (status == SUCCESS &&
        (!type_known(Atype) || Btype != Atype || (Ctype != Atype && Ctype != R_32F) ||
         !(computeType == COMPUTE_32F || (computeType == COMPUTE_32F_FAST_TF32 && Atype == R_32F)) ||
         !((algo >= -1 && algo <= 23) || (algo >= 99 && algo <= 115))))
        status = NOT_SUPPORTED;
    record(status,
           "gemm %s stream=0x%llx ta=%d tb=%d m=%d n=%d k=%d lda=%d ldb=%d ldc=%d sa=%lld sb=%lld sc=%lld batch=%d "
           "types=%d,%d,%d compute=%d",
           name(h), ADDRESS(h == NULL ? NULL : h->stream), transa, transb, m, n, k, lda, ldb, ldc, strideA, strideB,
           strideC, batch, Atype, Btype, Ctype, computeType);
    if (status == SUCCESS) h->busy++;
    struct timespec delay = {delay_us / 1000000, delay_us % 1000000 * 1000L};
    pthread_mutex_unlock(&lock);
    if (status != SUCCESS) return status;

    if (delay.tv_sec > 0 || delay.tv_nsec > 0) nanosleep(&delay, NULL);
    double a_factor = *(const float*)alpha, c_factor = *(const float*)beta;
    double* rows = malloc((((size_t)m + (size_t)n) * (size_t)k + 1) * sizeof *rows);
    double* columns = rows + (size_t)m * (size_t)k;
    if (rows == NULL) status = ALLOC_FAILED;
    for (int item = 0; item < batch && !empty && status == SUCCESS; item++) {
        pack(rows, A, Atype, m, k, item * strideA, transa ? lda : 1, transa ? 1 : lda);
        pack(columns, B, Btype, n, k, item * strideB, transb ? 1 : ldb, transb ? ldb : 1);
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < m; i++) {
                double sum = 0;
                for (int p = 0; p < k; p++) sum += rows[(size_t)i * k + p] * columns[(size_t)j * k + p];
                ptrdiff_t at = item * strideC + (ptrdiff_t)j * ldc + i;
                sum *= a_factor;
                if (c_factor != 0) sum += c_factor * load(C, Ctype, at);
                store(C, Ctype, at, sum);
            }
        }
    }
    free(rows);
    pthread_mutex_lock(&lock);
    h->busy--;
    pthread_mutex_unlock(&lock);
    return status;
}

#endif  // WITHOUT_GEMM
#endif  // STANDIN_RUNTIME
