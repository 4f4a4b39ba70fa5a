//! How busy NVIDIA's GPUs are, by their management library (NVML), which is loaded where it is there.

use super::{Collector, Lack, Places};
use crate::about::metrics;
use crate::text::value;
use crate::{About, Nanos, ObjectId, Rows};
use libloading::{Library, Symbol};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::time::Duration;

metrics! {
    Busy = "busy", "%", Gauge, "share of the last period in which a kernel ran";
    MemoryBusy = "memory_busy", "%", Gauge, "share of it in which its memory was read or written";
    MemoryUsed = "memory_used", "bytes", Gauge, "memory in use";
    MemoryTotal = "memory_total", "bytes", Gauge, "memory that it has";
    Temperature = "temperature", "C", Gauge, "of the chip";
    Power = "power", "mW", Gauge, "power drawn";
}

pub(super) const ABOUT: About = About {
    name: "gpu",
    source: "libnvidia-ml.so.1",
    object: "`gpuN`",
    at_most_every: Some(Duration::from_secs(1)),
    waits: true,
    metrics: METRICS,
    further: "",
    lacks: "machines without NVIDIA's driver; GPUs of others; GPUs beyond 64",
};

/// `NVML_SUCCESS` and `NVML_TEMPERATURE_GPU` (nvml.h).
const SUCCESS: c_int = 0;
const OF_CHIP: c_uint = 0;
/// More GPUs than this are not sampled.
const MOST: c_uint = 64;

type Device = *mut c_void;

/// `nvmlUtilization_t`.
#[derive(Default)]
#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_t`.
#[derive(Default)]
#[repr(C)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// The library's functions. They stay valid as long as the library is loaded, which this holds.
struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_int,
    utilization: unsafe extern "C" fn(Device, *mut Utilization) -> c_int,
    memory: unsafe extern "C" fn(Device, *mut Memory) -> c_int,
    temperature: unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int,
    power: unsafe extern "C" fn(Device, *mut c_uint) -> c_int,
    devices: Vec<Device>,
    _library: Library,
}

// SAFETY: NVML is thread-safe (its API reference says so), and a device is a handle that any thread may use.
unsafe impl Send for Nvml {}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the library was initialised, and nothing of it is used afterwards. What it says does not matter.
        let _ = unsafe { (self.shutdown)() };
    }
}

impl Nvml {
    fn start(name: &str, library: Library) -> Result<Nvml, Lack> {
        let lack = |error: libloading::Error| Lack(format!("{name}: {error}"));
        // SAFETY: the types of these functions are those of nvml.h.
        unsafe {
            let init: Symbol<'_, unsafe extern "C" fn() -> c_int> =
                library.get(b"nvmlInit_v2\0").map_err(lack)?;
            let shutdown = *library.get(b"nvmlShutdown\0").map_err(lack)?;
            let count: Symbol<'_, unsafe extern "C" fn(*mut c_uint) -> c_int> =
                library.get(b"nvmlDeviceGetCount_v2\0").map_err(lack)?;
            let handle: Symbol<'_, unsafe extern "C" fn(c_uint, *mut Device) -> c_int> =
                library.get(b"nvmlDeviceGetHandleByIndex_v2\0").map_err(lack)?;
            let utilization = *library.get(b"nvmlDeviceGetUtilizationRates\0").map_err(lack)?;
            let memory = *library.get(b"nvmlDeviceGetMemoryInfo\0").map_err(lack)?;
            let temperature = *library.get(b"nvmlDeviceGetTemperature\0").map_err(lack)?;
            let power = *library.get(b"nvmlDeviceGetPowerUsage\0").map_err(lack)?;
            let said = init();
            if said != SUCCESS {
                return Err(Lack(format!("{name}: nvmlInit_v2 says {said} (is the driver loaded?)")));
            }
            let mut devices = Vec::new();
            let mut number = 0;
            if count(&raw mut number) == SUCCESS {
                for index in 0..number.min(MOST) {
                    let mut device: Device = std::ptr::null_mut();
                    if handle(index, &raw mut device) == SUCCESS {
                        devices.push(device);
                    }
                }
            }
            let nvml = Nvml { shutdown, utilization, memory, temperature, power, devices, _library: library };
            if nvml.devices.is_empty() { Err(Lack(format!("{name}: there is no GPU"))) } else { Ok(nvml) }
        }
    }

    fn rows(&self, device: Device, object: ObjectId, rows: &mut Rows) {
        let (mut utilization, mut memory) = (Utilization::default(), Memory::default());
        let (mut temperature, mut power): (c_uint, c_uint) = (0, 0);
        // SAFETY: the device is one that the library gave, and each pointer is to what its function fills.
        let said = unsafe {
            [
                (self.utilization)(device, &raw mut utilization),
                (self.memory)(device, &raw mut memory),
                (self.temperature)(device, OF_CHIP, &raw mut temperature),
                (self.power)(device, &raw mut power),
            ]
        };
        // Each may not be supported.
        let mut put = |said: c_int, metric: M, value: f64| {
            if said == SUCCESS {
                rows.put(object, metric, value);
            }
        };
        put(said[0], M::Busy, f64::from(utilization.gpu));
        put(said[0], M::MemoryBusy, f64::from(utilization.memory));
        put(said[1], M::MemoryUsed, value(memory.used));
        put(said[1], M::MemoryTotal, value(memory.total));
        put(said[2], M::Temperature, f64::from(temperature));
        put(said[3], M::Power, f64::from(power));
    }
}

/// The collector.
pub(super) struct Gpu {
    name: String,
    /// Until the first sample: starting it may take a second.
    library: Option<Library>,
    nvml: Option<Nvml>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Gpu {
    pub(super) fn open(places: &Places) -> Result<Gpu, Lack> {
        let name = places.nvml.display().to_string();
        // SAFETY: loading runs the library's initialisers; it is NVIDIA's, found where the system's loader finds it.
        let library = unsafe { Library::new(&places.nvml) };
        let library = library.map_err(|error| Lack(format!("{name}: {error}")))?;
        Ok(Gpu { name, library: Some(library), nvml: None })
    }
}

impl Collector for Gpu {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn sample(&mut self, _: Nanos, rows: &mut Rows) -> Result<(), Lack> {
        if let Some(library) = self.library.take() {
            self.nvml = Some(Nvml::start(&self.name, library)?);
        }
        let Some(nvml) = &self.nvml else { return Ok(()) };
        for (number, device) in nvml.devices.iter().enumerate() {
            let Some(object) = rows.object(&format!("gpu{number}")) else { return Ok(()) };
            nvml.rows(*device, object, rows);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ABOUT, Gpu};
    use crate::Nanos;
    use crate::collect::fixture::places;
    use crate::collect::{Collector, Places};
    use crate::rows::tests::{key, sampled};
    use std::path::Path;
    use std::process::Command;

    /// A library with NVML's functions and two GPUs, of which the second has no power meter.
    const LIBRARY: &str = r#"
        static int on;
        int nvmlInit_v2(void) { on++; return FAILS; }
        int nvmlShutdown(void) { on--; return 0; }
        int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return i < 2 ? 0 : 2; }
        int nvmlDeviceGetUtilizationRates(void *d, struct { unsigned a, b; } *u) { u->a = 90 + (long)d; u->b = 40; return 0; }
        int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) { m[0] = 80ULL << 30; m[1] = 1; m[2] = 5ULL << 30; return 0; }
        int nvmlDeviceGetTemperature(void *d, unsigned s, unsigned *t) { *t = 61; return s; }
        int nvmlDeviceGetPowerUsage(void *d, unsigned *p) { *p = 300000; return (long)d == 2 ? 3 : 0; }
    "#;

    fn library(folder: &Path, fails: &str) -> Option<Places> {
        let source = folder.join("nvml.c");
        std::fs::write(&source, LIBRARY.replace("FAILS", fails)).unwrap();
        let places = places(folder);
        let built =
            Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).args([&places.nvml, &source]).status();
        match built {
            Ok(status) => {
                assert!(status.success());
                Some(places)
            }
            Err(error) => {
                println!("skipped: cc: {error}");
                None
            }
        }
    }

    #[test]
    fn what_each_gpu_tells_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let Some(places) = library(folder.path(), "0") else { return };
        let mut gpu = Gpu::open(&places).unwrap();
        let found = sampled(&ABOUT, |rows| gpu.sample(Nanos(1), rows).unwrap());
        assert_eq!(found[&key("gpu0", "busy")], 91.0);
        assert_eq!(found[&key("gpu1", "memory_used")], 5_368_709_120.0);
        assert_eq!(found[&key("gpu0", "power")], 300_000.0);
        assert_eq!(found[&key("gpu1", "temperature")], 61.0);
        assert_eq!(found.len(), 11);
    }

    #[test]
    fn without_library_or_driver_it_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let lack = Gpu::open(&places(folder.path())).unwrap_err().to_string();
        assert!(lack.contains("nvml.so"), "{lack}");
        let Some(places) = library(folder.path(), "9") else { return };
        let mut gpu = Gpu::open(&places).unwrap();
        let lack = gpu.sample(Nanos(1), &mut crate::Rows::new(&ABOUT)).unwrap_err().to_string();
        assert!(lack.contains("nvmlInit_v2 says 9"), "{lack}");
        drop(gpu);
        // A library that is something else.
        std::fs::write(&places.nvml, "x").unwrap();
        assert!(Gpu::open(&places).is_err());
    }
}
