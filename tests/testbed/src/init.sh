#!/bin/busybox sh
# The VM's first process: mounts what Linux tools expect, brings up the network, starts the agent.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
ln -s /proc/self/fd /dev/fd
# Informational messages stay in dmesg: the emulated serial port is slow.
echo 4 > /proc/sys/kernel/printk
modprobe -a virtio_pci virtio_console virtio_net
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
modprobe configfs
mount -t configfs configfs /sys/kernel/config
hostname testbed
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
# The first guess of the clock's rate can be wrong by a thousandth until the kernel has refined it.
for try in $(seq 50); do
    grep -q early /sys/devices/system/clocksource/clocksource0/current_clocksource || break
    sleep 0.1
done
ulimit -l unlimited
ulimit -n 65536
for port in /sys/class/virtio-ports/*; do
    if [ "$(cat "$port/name")" = fabscope.testbed ]; then
        testbed-agent "/dev/${port##*/}"
    fi
done
echo "the agent has ended" > /dev/console
sync
poweroff -f
