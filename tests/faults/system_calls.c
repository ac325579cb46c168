/* The n-th call of the C library that changes a file below a folder fails: the process is killed, or errno is set.
 *
 * Loaded with LD_PRELOAD. A program arms it with faults_arm(); until then every call goes straight on. A write that is
 * hit by a kill or by a full disk gets half of its bytes through first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define KILL (-1)
#define LOGGED 4096
#define FICLONE_REQUEST 0x40049409UL

static char folder[PATH_MAX];
static size_t folder_length;
static long fails_at;
static int fault, lasting, no_exchange;
static atomic_long count;
static const char *names[LOGGED];

/* fault: 0 counts only, -1 kills, else an errno. lasting: what takes room goes on failing, as on a full disk. */
void faults_arm(const char *below, long at, int what, int goes_on, int without_exchange) {
    folder_length = 0;
    strncpy(folder, below, sizeof folder - 1);
    fails_at = at, fault = what, lasting = goes_on, no_exchange = without_exchange;
    atomic_store(&count, 0);
    folder_length = strlen(folder);
}
long faults_count(void) { return atomic_load(&count); }
const char *faults_name(long number) { return number < 1 || number > LOGGED ? "" : names[number - 1]; }

static int path_is_below(int at, const char *path) {
    char full[PATH_MAX * 2];
    if (!folder_length || !path) return 0;
    if (path[0] == '/') return !strncmp(path, folder, folder_length);
    if (at == AT_FDCWD) {
        if (!getcwd(full, sizeof full)) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, full, sizeof full - 1);
        if (length < 0) return 0;
        full[length] = 0;
    }
    return !strncmp(full, folder, folder_length);
}

static int file_is_below(int descriptor) {
    if (!folder_length) return 0;
    return path_is_below(descriptor, ""); /* the path that the descriptor has */
}

enum kind { CHANGES, TAKES_ROOM, WRITES };

/* Count a call. 0: go on. -1: it fails, errno is set. 1: half of its bytes get through, then the fault is done. */
static int step(const char *name, enum kind kind) {
    long number = atomic_fetch_add(&count, 1) + 1;
    if (number <= LOGGED) names[number - 1] = name;
    if (!fault || number < fails_at) return 0;
    if (number > fails_at && !(lasting == 2 || (lasting && kind != CHANGES))) return 0;
    if (kind == WRITES && number == fails_at && (fault == KILL || fault == ENOSPC)) return 1;
    if (fault == KILL) kill(getpid(), SIGKILL);
    errno = fault;
    return -1;
}
static void after_half(void) {
    if (fault == KILL) kill(getpid(), SIGKILL);
}

#define NEXT(type, name, ...) \
    static type (*next)(__VA_ARGS__); \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* A call that changes a file and returns 0 or -1. */
#define SIMPLE(name, kind, below, parameters, arguments) \
    int name parameters { \
        static int (*next) parameters; \
        if (!next) next = (int (*) parameters)dlsym(RTLD_NEXT, #name); \
        if ((below) && step(#name, kind)) return -1; \
        return next arguments; \
    }

SIMPLE(mkdir, TAKES_ROOM, path_is_below(AT_FDCWD, p), (const char *p, mode_t m), (p, m))
SIMPLE(mkdirat, TAKES_ROOM, path_is_below(d, p), (int d, const char *p, mode_t m), (d, p, m))
SIMPLE(rmdir, CHANGES, path_is_below(AT_FDCWD, p), (const char *p), (p))
SIMPLE(unlink, CHANGES, path_is_below(AT_FDCWD, p), (const char *p), (p))
SIMPLE(unlinkat, CHANGES, path_is_below(d, p), (int d, const char *p, int f), (d, p, f))
SIMPLE(remove, CHANGES, path_is_below(AT_FDCWD, p), (const char *p), (p))
SIMPLE(rename, CHANGES, path_is_below(AT_FDCWD, b), (const char *a, const char *b), (a, b))
SIMPLE(renameat, CHANGES, path_is_below(e, b), (int d, const char *a, int e, const char *b), (d, a, e, b))
SIMPLE(link, TAKES_ROOM, path_is_below(AT_FDCWD, b), (const char *a, const char *b), (a, b))
SIMPLE(linkat, TAKES_ROOM, path_is_below(e, b), (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f))
SIMPLE(symlink, TAKES_ROOM, path_is_below(AT_FDCWD, b), (const char *a, const char *b), (a, b))
SIMPLE(symlinkat, TAKES_ROOM, path_is_below(d, b), (const char *a, int d, const char *b), (a, d, b))
SIMPLE(chmod, CHANGES, path_is_below(AT_FDCWD, p), (const char *p, mode_t m), (p, m))
SIMPLE(fchmod, CHANGES, file_is_below(f), (int f, mode_t m), (f, m))
SIMPLE(fchmodat, CHANGES, path_is_below(d, p), (int d, const char *p, mode_t m, int f), (d, p, m, f))
SIMPLE(utimensat, CHANGES, path_is_below(d, p), (int d, const char *p, const struct timespec t[2], int f), (d, p, t, f))
SIMPLE(futimens, CHANGES, file_is_below(f), (int f, const struct timespec t[2]), (f, t))
SIMPLE(truncate, TAKES_ROOM, path_is_below(AT_FDCWD, p), (const char *p, off_t n), (p, n))
SIMPLE(truncate64, TAKES_ROOM, path_is_below(AT_FDCWD, p), (const char *p, off64_t n), (p, n))
SIMPLE(ftruncate, TAKES_ROOM, file_is_below(f), (int f, off_t n), (f, n))
SIMPLE(ftruncate64, TAKES_ROOM, file_is_below(f), (int f, off64_t n), (f, n))
SIMPLE(fallocate, TAKES_ROOM, file_is_below(f), (int f, int m, off_t a, off_t n), (f, m, a, n))
SIMPLE(fallocate64, TAKES_ROOM, file_is_below(f), (int f, int m, off64_t a, off64_t n), (f, m, a, n))
SIMPLE(fsync, CHANGES, file_is_below(f), (int f), (f))
SIMPLE(fdatasync, CHANGES, file_is_below(f), (int f), (f))

/* These return the error and leave errno alone. */
int posix_fallocate(int f, off_t a, off_t n) {
    NEXT(int, posix_fallocate, int, off_t, off_t);
    return file_is_below(f) && step("posix_fallocate", TAKES_ROOM) ? errno : next(f, a, n);
}
int posix_fallocate64(int f, off64_t a, off64_t n) {
    NEXT(int, posix_fallocate64, int, off64_t, off64_t);
    return file_is_below(f) && step("posix_fallocate64", TAKES_ROOM) ? errno : next(f, a, n);
}

static int renamed(const char *name, int at, const char *path, unsigned flags) {
    if (!path_is_below(at, path)) return 0;
    if (no_exchange && flags) {
        errno = EINVAL;
        return -1;
    }
    return step(name, CHANGES);
}
int renameat2(int d, const char *a, int e, const char *b, unsigned f) {
    NEXT(int, renameat2, int, const char *, int, const char *, unsigned);
    return renamed("renameat2", e, b, f) ? -1 : next(d, a, e, b, f);
}
long syscall(long number, ...) {
    NEXT(long, syscall, long, ...);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_renameat2 && renamed("renameat2", (int)a[2], (const char *)a[3], (unsigned)a[4])) return -1;
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int ioctl(int f, unsigned long request, ...) {
    NEXT(int, ioctl, int, unsigned long, ...);
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (request == FICLONE_REQUEST && file_is_below(f) && step("ficlone", TAKES_ROOM)) return -1;
    return next(f, request, argument);
}

/* An open that only reads is nobody's business. */
static int opens(const char *name, int at, const char *path, int flags) {
    int creates = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
    return creates && path_is_below(at, path) && step(name, flags & O_CREAT ? TAKES_ROOM : CHANGES);
}
static mode_t mode_of(int flags, va_list list) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0;
}
#define OPEN(name, head, forward, at) \
    int name head { \
        static int (*next) head; \
        if (!next) next = (int (*) head)dlsym(RTLD_NEXT, #name); \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = mode_of(flags, list); \
        va_end(list); \
        return opens(#name, at, path, flags) ? -1 : next forward; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int d, const char *path, int flags, ...), (d, path, flags, mode), d)
OPEN(openat64, (int d, const char *path, int flags, ...), (d, path, flags, mode), d)
SIMPLE(creat, TAKES_ROOM, path_is_below(AT_FDCWD, p), (const char *p, mode_t m), (p, m))
SIMPLE(creat64, TAKES_ROOM, path_is_below(AT_FDCWD, p), (const char *p, mode_t m), (p, m))

/* A call that moves `n` bytes into the descriptor `f`, and returns how many. */
#define MOVES(name, f, parameters, arguments, halved) \
    ssize_t name parameters { \
        static ssize_t (*next) parameters; \
        if (!next) next = (ssize_t (*) parameters)dlsym(RTLD_NEXT, #name); \
        int fate = file_is_below(f) ? step(#name, WRITES) : 0; \
        if (fate < 0) return -1; \
        if (!fate) return next arguments; \
        ssize_t done = n > 1 ? next halved : 0; \
        after_half(); \
        if (done > 0) return done; \
        errno = fault; \
        return -1; \
    }
MOVES(write, f, (int f, const void *b, size_t n), (f, b, n), (f, b, n / 2))
MOVES(pwrite, f, (int f, const void *b, size_t n, off_t o), (f, b, n, o), (f, b, n / 2, o))
MOVES(pwrite64, f, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), (f, b, n / 2, o))
MOVES(writev, f, (int f, const struct iovec *v, int n), (f, v, n), (f, v, n / 2))
MOVES(pwritev, f, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), (f, v, n / 2, o))
MOVES(pwritev64, f, (int f, const struct iovec *v, int n, off64_t o), (f, v, n, o), (f, v, n / 2, o))
MOVES(pwritev2, f, (int f, const struct iovec *v, int n, off_t o, int g), (f, v, n, o, g), (f, v, n / 2, o, g))
MOVES(pwritev64v2, f, (int f, const struct iovec *v, int n, off64_t o, int g), (f, v, n, o, g), (f, v, n / 2, o, g))
MOVES(sendfile, f, (int f, int s, off_t *o, size_t n), (f, s, o, n), (f, s, o, n / 2))
MOVES(sendfile64, f, (int f, int s, off64_t *o, size_t n), (f, s, o, n), (f, s, o, n / 2))
MOVES(copy_file_range, f, (int s, off64_t *a, int f, off64_t *b, size_t n, unsigned g), (s, a, f, b, n, g),
      (s, a, f, b, n / 2, g))
