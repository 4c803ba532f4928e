/* What a process writes under one directory, in order and with its bytes: the input of replay.py. An LD_PRELOAD library.
 *
 *   KVD_RECORD_DIR   the directory, as realpath gives it
 *   KVD_RECORD_LOG   the log, outside of it; must exist
 *
 * Every call that changes something below the directory is made under one lock and appended to the log when it has succeeded, so that the log's order is
 * the order in which things happened. Files are named by inode number, which a descriptor keeps through renames, dup and close; a CREATE or MKDIR gives a
 * number that was used before to a new file. Others append MARK records to the same log (O_APPEND): what stands before a mark was done before it.
 * What can't be recorded (a writable shared map, sendfile and the like) becomes an UNKNOWN record, which makes the replay fail.
 * sync_file_range and msync promise nothing about a file's size or name and are not taken for syncs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR, LINK, MARK, UNKNOWN };
enum { DURABLE = 1 };

struct record {
    uint32_t magic;
    uint8_t op, flags;
    uint16_t path_bytes, path2_bytes, zero;
    uint64_t inode, offset, length;
} __attribute__((packed));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *root;
static size_t root_bytes;
static int log_fd = -1;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("KVD_RECORD_LOG"), *dir = getenv("KVD_RECORD_DIR");
    if (!path || !dir) return;
    log_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    if (log_fd < 0) abort();
    root = dir;
    root_bytes = strlen(dir);
}

static int below(const char *path) {
    return root && !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || path[root_bytes] == 0);
}

static int of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return 1;
}

static int mine(int fd) {
    char path[PATH_MAX];
    int kept = errno, found = root && of_fd(fd, path) && below(path);
    errno = kept;
    return found;
}

/* The absolute path of (dirfd, path); whether it lies below the directory. */
static int resolve(int dirfd, const char *path, char *out) {
    if (!root || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX];
        if (dirfd == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0;
        } else if (!of_fd(dirfd, base)) {
            return 0;
        }
        if (strlen(base) + strlen(path) + 2 > PATH_MAX) return 0;
        strcpy(out, base);
        strcat(out, "/");
        strcat(out, path);
    }
    return below(out);
}

static uint64_t inode_of(int fd) {
    struct stat st;
    return fstat(fd, &st) ? 0 : st.st_ino;
}

static uint64_t inode_at(const char *path) {
    struct stat st;
    return lstat(path, &st) ? 0 : st.st_ino;
}

static void append(int op, int flags, const char *path, const char *path2, uint64_t inode, uint64_t offset, uint64_t length, const struct iovec *data, int num) {
    int kept = errno;
    const char *first = path ? path + root_bytes : "", *second = path2 ? path2 + root_bytes : "";
    struct record head = {0x504d4b52, op, flags, strlen(first), strlen(second), 0, inode, offset, length};
    struct iovec fixed[3] = {{&head, sizeof head}, {(void *)first, head.path_bytes}, {(void *)second, head.path2_bytes}};
    size_t total = sizeof head + head.path_bytes + head.path2_bytes + (data ? length : 0);
    char *buffer = malloc(total), *end = buffer;
    if (!buffer) abort();
    for (int i = 0; i < 3; i++) end = (char *)memcpy(end, fixed[i].iov_base, fixed[i].iov_len) + fixed[i].iov_len;
    size_t left = data ? length : 0;
    for (int i = 0; i < num && left; i++) {
        size_t take = data[i].iov_len < left ? data[i].iov_len : left;
        end = (char *)memcpy(end, data[i].iov_base, take) + take;
        left -= take;
    }
    if ((size_t)syscall(SYS_write, log_fd, buffer, total) != total) abort();
    free(buffer);
    errno = kept;
}

/* ---------------------------------------------------------------- opening */

static int open_recorded(int dirfd, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(dirfd, path, full)) return syscall(SYS_openat, dirfd, path, flags, mode);
    pthread_mutex_lock(&lock);
    int existed = inode_at(full) != 0;
    int fd = syscall(SYS_openat, dirfd, path, flags, mode);
    if (fd >= 0) {
        if ((flags & O_TMPFILE) == O_TMPFILE) append(UNKNOWN, 0, full, 0, inode_of(fd), 0, 0, 0, 0);
        else if (!existed) append(CREATE, 0, full, 0, inode_of(fd), 0, 0, 0, 0);
        else if (flags & O_TRUNC) append(TRUNCATE, 0, 0, 0, inode_of(fd), 0, 0, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

static mode_t mode_of(int flags, va_list arguments) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; }
#define OPEN(name) int name(const char *path, int flags, ...) { va_list a; va_start(a, flags); mode_t mode = mode_of(flags, a); va_end(a); return open_recorded(AT_FDCWD, path, flags, mode); }
#define OPENAT(name) int name(int dirfd, const char *path, int flags, ...) { va_list a; va_start(a, flags); mode_t mode = mode_of(flags, a); va_end(a); return open_recorded(dirfd, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
int creat(const char *path, mode_t mode) { return open_recorded(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* ---------------------------------------------------------------- writing */

/* position -1: at the descriptor's own, which the call moves. */
static ssize_t write_recorded(int fd, const struct iovec *data, int num, off_t position) {
    if (!mine(fd)) return position < 0 ? syscall(SYS_writev, fd, data, num) : syscall(SYS_pwritev, fd, data, num, position, 0);
    pthread_mutex_lock(&lock);
    int flags = syscall(SYS_fcntl, fd, F_GETFL);
    off_t at = position;
    if (flags & O_APPEND) {
        struct stat st;
        at = fstat(fd, &st) ? 0 : st.st_size;
    } else if (position < 0) {
        at = lseek(fd, 0, SEEK_CUR);
    }
    ssize_t done = position < 0 ? syscall(SYS_writev, fd, data, num) : syscall(SYS_pwritev, fd, data, num, position, 0);
    if (done > 0) append(WRITE, flags & O_DSYNC ? DURABLE : 0, 0, 0, inode_of(fd), at, done, data, num);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return root && fd != log_fd && mine(fd) ? write_recorded(fd, &one, 1, -1) : syscall(SYS_write, fd, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { struct iovec one = {(void *)data, size}; return write_recorded(fd, &one, 1, offset); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *data, int num) { return write_recorded(fd, data, num, -1); }
ssize_t pwritev64(int fd, const struct iovec *data, int num, off64_t offset) { return write_recorded(fd, data, num, offset); }
ssize_t pwritev(int fd, const struct iovec *data, int num, off_t offset) { return write_recorded(fd, data, num, offset); }

static int truncate_recorded(int fd, off_t size) {
    if (!mine(fd)) return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_ftruncate, fd, size);
    if (!done) append(TRUNCATE, 0, 0, 0, inode_of(fd), size, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate64(int fd, off64_t size) { return truncate_recorded(fd, size); }
int ftruncate(int fd, off_t size) { return truncate_recorded(fd, size); }

int truncate64(const char *path, off64_t size) {
    char full[PATH_MAX];
    if (!resolve(AT_FDCWD, path, full)) return syscall(SYS_truncate, path, size);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_truncate, path, size);
    if (!done) append(TRUNCATE, 0, 0, 0, inode_at(full), size, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int truncate(const char *path, off_t size) { return truncate64(path, size); }

static int allocate_recorded(int fd, int mode, off_t offset, off_t length) {
    if (!mine(fd)) return syscall(SYS_fallocate, fd, mode, offset, length);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_fallocate, fd, mode, offset, length);
    struct stat st;
    if (!done && mode) append(UNKNOWN, 0, 0, 0, inode_of(fd), offset, 0, 0, 0);
    else if (!done && !fstat(fd, &st)) append(TRUNCATE, 0, 0, 0, st.st_ino, st.st_size, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) { return allocate_recorded(fd, mode, offset, length); }
int fallocate(int fd, int mode, off_t offset, off_t length) { return allocate_recorded(fd, mode, offset, length); }
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return allocate_recorded(fd, 0, offset, length) ? errno : 0; }
int posix_fallocate(int fd, off_t offset, off_t length) { return posix_fallocate64(fd, offset, length); }

/* ---------------------------------------------------------------- syncing */

static int sync_recorded(int fd, long call) {
    if (!mine(fd)) return syscall(call, fd);
    pthread_mutex_lock(&lock);
    int done = syscall(call, fd);
    if (!done) append(SYNC, 0, 0, 0, inode_of(fd), 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int fsync(int fd) { return sync_recorded(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_recorded(fd, SYS_fdatasync); }

/* ---------------------------------------------------------------- names */

static int rename_recorded(int fd1, const char *path1, int fd2, const char *path2, unsigned flags) {
    char from[PATH_MAX], to[PATH_MAX];
    int inside = resolve(fd1, path1, from) + resolve(fd2, path2, to);
    if (!inside) return syscall(SYS_renameat2, fd1, path1, fd2, path2, flags);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_renameat2, fd1, path1, fd2, path2, flags);
    if (!done) {
        if (flags || inside != 2) append(UNKNOWN, 0, 0, 0, 0, 0, 0, 0, 0);
        else append(RENAME, 0, from, to, inode_at(to), 0, 0, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int rename(const char *from, const char *to) { return rename_recorded(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int fd1, const char *from, int fd2, const char *to) { return rename_recorded(fd1, from, fd2, to, 0); }
int renameat2(int fd1, const char *from, int fd2, const char *to, unsigned flags) { return rename_recorded(fd1, from, fd2, to, flags); }

static int unlink_recorded(int dirfd, const char *path, int flags) {
    char full[PATH_MAX];
    if (!resolve(dirfd, path, full)) return syscall(SYS_unlinkat, dirfd, path, flags);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_unlinkat, dirfd, path, flags);
    if (!done) append(UNLINK, 0, full, 0, 0, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int unlink(const char *path) { return unlink_recorded(AT_FDCWD, path, 0); }
int unlinkat(int dirfd, const char *path, int flags) { return unlink_recorded(dirfd, path, flags); }
int rmdir(const char *path) { return unlink_recorded(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { int done = unlink(path); return done && (errno == EISDIR || errno == EPERM) ? rmdir(path) : done; }

static int mkdir_recorded(int dirfd, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!resolve(dirfd, path, full)) return syscall(SYS_mkdirat, dirfd, path, mode);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_mkdirat, dirfd, path, mode);
    if (!done) append(MKDIR, 0, full, 0, inode_at(full), 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int mkdir(const char *path, mode_t mode) { return mkdir_recorded(AT_FDCWD, path, mode); }
int mkdirat(int dirfd, const char *path, mode_t mode) { return mkdir_recorded(dirfd, path, mode); }

static int link_recorded(int fd1, const char *from, int fd2, const char *to, int flags) {
    char full1[PATH_MAX], full2[PATH_MAX];
    if (!resolve(fd2, to, full2)) return syscall(SYS_linkat, fd1, from, fd2, to, flags);
    pthread_mutex_lock(&lock);
    int done = syscall(SYS_linkat, fd1, from, fd2, to, flags);
    if (!done) append(resolve(fd1, from, full1) ? LINK : UNKNOWN, 0, 0, full2, inode_at(full2), 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return done;
}
int link(const char *from, const char *to) { return link_recorded(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int fd1, const char *from, int fd2, const char *to, int flags) { return link_recorded(fd1, from, fd2, to, flags); }

/* ---------------------------------------------------------------- what can't be recorded */

static void unknown(int fd) {
    char path[PATH_MAX];
    if (!root || fd < 0 || !of_fd(fd, path) || !below(path)) return;
    size_t n = strlen(path);
    if (n > 9 && !strcmp(path + n - 9, "/lock.mdb")) return; /* LMDB's lock table: rebuilt by the next process */
    pthread_mutex_lock(&lock);
    append(UNKNOWN, 0, path, 0, 0, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
}

void *mmap64(void *at, size_t length, int prot, int flags, int fd, off64_t offset) {
    if ((flags & MAP_SHARED) && (prot & PROT_WRITE)) unknown(fd);
    return (void *)syscall(SYS_mmap, at, length, prot, flags, fd, offset);
}
void *mmap(void *at, size_t length, int prot, int flags, int fd, off_t offset) { return mmap64(at, length, prot, flags, fd, offset); }
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) { unknown(out); return syscall(SYS_sendfile, out, in, offset, count); }
ssize_t sendfile(int out, int in, off_t *offset, size_t count) { return sendfile64(out, in, offset, count); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t count, unsigned flags) {
    unknown(out);
    return syscall(SYS_copy_file_range, in, from, out, to, count, flags);
}
