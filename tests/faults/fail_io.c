/*
 * Lets the disk fail on command: an LD_PRELOAD layer between a daemon and libc. LMDB's calls go through it as well as Python's.
 *
 * FAIL_IO_CONTROL names a file of rules (see fail_layer.py) that the test maps, too, and changes while the daemon runs. A call of a rule's classes
 * on a path that begins with its prefix and contains its part fails with its errno: always, at the nth such call alone, at every kth, or from the nth on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, OPEN = 4, RENAME = 8, ALLOCATE = 16, MKDIR = 32, MAP = 64, UNLINK = 128, OPEN_READ = 256 };
enum { ALWAYS, NTH, EVERY, FROM };

struct rule {
    uint32_t active, classes, error, mode;
    uint64_t number, calls, failed;
    char prefix[256], part[64];
};
#define RULES 8

static struct rule *rules;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAIL_IO_CONTROL");
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    int fd = path ? real(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, RULES * sizeof(struct rule), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) rules = memory;
    close(fd);
}

/* The error of a call, 0 if it may pass. Either a descriptor, or a path relative to one (AT_FDCWD: to the working directory). */
static int refusal(uint32_t class, int fd, int dirfd, const char *path) {
    char link[64], full[PATH_MAX * 2];
    ssize_t length;
    size_t used = 0;
    int i, known = 0, saved = errno;
    if (!rules) return 0;
    for (i = 0; i < RULES; i++) {
        struct rule *rule = &rules[i];
        uint64_t call;
        if (!__atomic_load_n(&rule->active, __ATOMIC_ACQUIRE) || !(rule->classes & class)) continue;
        if (!known) {
            known = 1;
            if (path && path[0] == '/') {
                snprintf(full, sizeof full, "%s", path);
            } else {
                if (path && dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
                else snprintf(link, sizeof link, "/proc/self/fd/%d", path ? dirfd : fd);
                length = readlink(link, full, PATH_MAX);
                if (length < 0) { errno = saved; return 0; }
                used = (size_t)length;
                full[used] = 0;
                if (path) snprintf(full + used, sizeof full - used, "/%s", path);
            }
        }
        if (strncmp(full, rule->prefix, strlen(rule->prefix)) || !strstr(full, rule->part)) continue;
        call = __atomic_add_fetch(&rule->calls, 1, __ATOMIC_SEQ_CST);
        if (rule->mode == NTH && call != rule->number) continue;
        if (rule->mode == EVERY && call % rule->number) continue;
        if (rule->mode == FROM && call < rule->number) continue;
        __atomic_add_fetch(&rule->failed, 1, __ATOMIC_SEQ_CST);
        errno = saved;
        return (int)rule->error;
    }
    errno = saved;
    return 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define CHECK(class, fd, dirfd, path, result) \
    do { int error_ = refusal(class, fd, dirfd, path); if (error_) { errno = error_; return result; } } while (0)

#define WRITES(name, parameters, arguments, ...) \
    ssize_t name parameters { REAL(ssize_t, #name, __VA_ARGS__); CHECK(WRITE, fd, 0, NULL, -1); return real arguments; }
WRITES(write, (int fd, const void *data, size_t size), (fd, data, size), int, const void *, size_t)
WRITES(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), int, const void *, size_t, off_t)
WRITES(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), int, const void *, size_t, off64_t)
WRITES(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), int, const struct iovec *, int)
WRITES(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), int, const struct iovec *, int, off_t)
WRITES(pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at), int, const struct iovec *, int, off64_t)

#define ON_FD(name, class, parameters, arguments, ...) \
    int name parameters { REAL(int, #name, __VA_ARGS__); CHECK(class, fd, 0, NULL, -1); return real arguments; }
ON_FD(fsync, SYNC, (int fd), (fd), int)
ON_FD(fdatasync, SYNC, (int fd), (fd), int)
ON_FD(ftruncate, ALLOCATE, (int fd, off_t size), (fd, size), int, off_t)
ON_FD(ftruncate64, ALLOCATE, (int fd, off64_t size), (fd, size), int, off64_t)
ON_FD(fallocate, ALLOCATE, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), int, int, off_t, off_t)
ON_FD(fallocate64, ALLOCATE, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size), int, int, off64_t, off64_t)

int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(int, "posix_fallocate", int, off_t, off_t);
    int error = refusal(ALLOCATE, fd, 0, NULL);
    return error ? error : real(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(int, "posix_fallocate64", int, off64_t, off64_t);
    int error = refusal(ALLOCATE, fd, 0, NULL);
    return error ? error : real(fd, at, size);
}

#define ON_PATH(name, class, parameters, arguments, dirfd, path, ...) \
    int name parameters { REAL(int, #name, __VA_ARGS__); CHECK(class, -1, dirfd, path, -1); return real arguments; }
ON_PATH(truncate, ALLOCATE, (const char *path, off_t size), (path, size), AT_FDCWD, path, const char *, off_t)
ON_PATH(truncate64, ALLOCATE, (const char *path, off64_t size), (path, size), AT_FDCWD, path, const char *, off64_t)
ON_PATH(mkdir, MKDIR, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, const char *, mode_t)
ON_PATH(mkdirat, MKDIR, (int at, const char *path, mode_t mode), (at, path, mode), at, path, int, const char *, mode_t)
ON_PATH(unlink, UNLINK, (const char *path), (path), AT_FDCWD, path, const char *)
ON_PATH(unlinkat, UNLINK, (int at, const char *path, int flags), (at, path, flags), at, path, int, const char *, int)
ON_PATH(rmdir, UNLINK, (const char *path), (path), AT_FDCWD, path, const char *)
ON_PATH(rename, RENAME, (const char *from, const char *to), (from, to), AT_FDCWD, to, const char *, const char *)
ON_PATH(renameat, RENAME, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, int, const char *, int, const char *)

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list list; mode_t mode; \
        REAL(int, #name, const char *, int, ...); \
        va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); \
        CHECK(flags & (O_WRONLY | O_RDWR | O_CREAT) ? OPEN : OPEN_READ, -1, AT_FDCWD, path, -1); \
        return real(path, flags, mode); }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list list; mode_t mode; \
        REAL(int, #name, int, const char *, int, ...); \
        va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); \
        CHECK(flags & (O_WRONLY | O_RDWR | O_CREAT) ? OPEN : OPEN_READ, -1, at, path, -1); \
        return real(at, path, flags, mode); }
OPENS_AT(openat)
OPENS_AT(openat64)

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t at) {
    REAL(void *, "mmap", void *, size_t, int, int, int, off_t);
    if (fd >= 0) CHECK(MAP, fd, 0, NULL, MAP_FAILED);
    return real(address, size, protection, flags, fd, at);
}
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t at) {
    REAL(void *, "mmap64", void *, size_t, int, int, int, off64_t);
    if (fd >= 0) CHECK(MAP, fd, 0, NULL, MAP_FAILED);
    return real(address, size, protection, flags, fd, at);
}
