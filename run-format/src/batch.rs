//! Commands and queues as columns on their way into Parquet and back. It knows no files.

use crate::{Boundary, Command, Endpoint, Nanos, Queue, QueueId, Side, Transport};
use polars::prelude::{
    BooleanChunked, Column, DataFrame, Int64Chunked, IntoColumn, NamedFrom, NewChunkedArray, PolarsResult,
    Series, StringChunked, UInt16Chunked,
};

/// Commands of one side as columns, filled without allocating once it has grown.
#[derive(Debug)]
pub(crate) struct Batch {
    side: Side,
    queue: Vec<u32>,
    cid: Vec<u16>,
    opcode: Vec<u8>,
    nsid: Vec<u32>,
    slba: Vec<u64>,
    nlb: Vec<u16>,
    bytes: Vec<u32>,
    status: Vec<u16>,
    cpu: Vec<u16>,
    flags: Vec<u16>,
    r2ts: Vec<u8>,
    stream_position: Vec<Option<u32>>,
    r2t_turnaround: Vec<Option<i64>>,
    drive: Vec<Option<i64>>,
    times: [Vec<Option<i64>>; Command::SLOTS],
}

impl Batch {
    pub(crate) fn new(side: Side) -> Batch {
        Batch {
            side,
            queue: Vec::new(),
            cid: Vec::new(),
            opcode: Vec::new(),
            nsid: Vec::new(),
            slba: Vec::new(),
            nlb: Vec::new(),
            bytes: Vec::new(),
            status: Vec::new(),
            cpu: Vec::new(),
            flags: Vec::new(),
            r2ts: Vec::new(),
            stream_position: Vec::new(),
            r2t_turnaround: Vec::new(),
            drive: Vec::new(),
            times: Default::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn push(&mut self, c: &Command) {
        self.queue.push(c.queue.0);
        self.cid.push(c.cid.0);
        self.opcode.push(c.opcode);
        self.nsid.push(c.nsid);
        self.slba.push(c.slba);
        self.nlb.push(c.nlb0);
        self.bytes.push(c.bytes);
        self.status.push(c.status);
        self.cpu.push(c.cpu);
        self.flags.push(c.flags);
        self.r2ts.push(c.r2ts);
        self.stream_position.push(c.stream_position);
        self.r2t_turnaround.push(c.r2t_turnaround.map(Nanos::as_i64));
        self.drive.push(c.drive.map(Nanos::as_i64));
        for (column, time) in self.times.iter_mut().zip(c.times) {
            column.push(time.map(Nanos::as_i64));
        }
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.cid.clear();
        self.opcode.clear();
        self.nsid.clear();
        self.slba.clear();
        self.nlb.clear();
        self.bytes.clear();
        self.status.clear();
        self.cpu.clear();
        self.flags.clear();
        self.r2ts.clear();
        self.stream_position.clear();
        self.r2t_turnaround.clear();
        self.drive.clear();
        self.times.iter_mut().for_each(Vec::clear);
    }

    /// The batch as a frame with the columns of [`crate::columns::commands`].
    pub(crate) fn to_frame(&self) -> PolarsResult<DataFrame> {
        fn of<'a, T: ?Sized>(name: &str, values: &'a T) -> Column
        where
            Series: NamedFrom<&'a T, T>,
        {
            Series::new(name.into(), values).into_column()
        }
        let mut frame = vec![
            of("queue", self.queue.as_slice()),
            of("cid", self.cid.as_slice()),
            of("opcode", self.opcode.as_slice()),
            of("nsid", self.nsid.as_slice()),
            of("slba", self.slba.as_slice()),
            of("nlb", self.nlb.as_slice()),
            of("bytes", self.bytes.as_slice()),
            of("status", self.status.as_slice()),
            of("cpu", self.cpu.as_slice()),
            of("flags", self.flags.as_slice()),
            of("r2ts", self.r2ts.as_slice()),
            of("stream_position", self.stream_position.as_slice()),
        ];
        frame.extend(Boundary::of(self.side).map(|b| of(b.name(), self.times[b.slot()].as_slice())));
        frame.push(match self.side {
            Side::Host => of("h_r2t_turnaround", self.r2t_turnaround.as_slice()),
            Side::Target => of("t_drive", self.drive.as_slice()),
        });
        DataFrame::new(self.len(), frame)
    }
}

/// The queues of a run as a frame with the columns of [`crate::columns::QUEUES`], numbered in their order.
pub(crate) fn queues_to_frame(queues: &[Queue]) -> PolarsResult<DataFrame> {
    fn text<'a>(name: &str, values: impl Iterator<Item = Option<&'a str>>) -> Column {
        StringChunked::from_iter_options(name.into(), values).into_column()
    }
    fn number(name: &str, values: impl Iterator<Item = Option<u16>>) -> Column {
        UInt16Chunked::from_iter_options(name.into(), values).into_column()
    }
    let address = |e: &Option<Endpoint>| e.as_ref().map(|e| e.address.clone());
    let host: Vec<Option<String>> = queues.iter().map(|q| address(&q.host)).collect();
    let target: Vec<Option<String>> = queues.iter().map(|q| address(&q.target)).collect();
    let ids: Vec<u32> = (0..u32::try_from(queues.len()).unwrap_or(u32::MAX)).collect();
    let frame = vec![
        Series::new("queue".into(), ids.as_slice()).into_column(),
        text("subsystem_nqn", queues.iter().map(|q| Some(q.subsystem_nqn.as_str()))),
        text("host_nqn", queues.iter().map(|q| Some(q.host_nqn.as_str()))),
        number("cntlid", queues.iter().map(|q| Some(q.cntlid))),
        number("qid", queues.iter().map(|q| Some(q.qid))),
        text("transport", queues.iter().map(|q| Some(q.transport.name()))),
        text("host_address", host.iter().map(Option::as_deref)),
        number("host_port", queues.iter().map(|q| q.host.as_ref().map(|e| e.port))),
        text("target_address", target.iter().map(Option::as_deref)),
        number("target_port", queues.iter().map(|q| q.target.as_ref().map(|e| e.port))),
        text("device", queues.iter().map(|q| q.device.as_deref())),
        text("served_by", queues.iter().map(|q| q.served_by.as_deref())),
        Int64Chunked::from_iter_values("came".into(), queues.iter().map(|q| q.came.as_i64())).into_column(),
        BooleanChunked::from_iter_values("existed".into(), queues.iter().map(|q| q.existed)).into_column(),
        Int64Chunked::from_iter_options("went".into(), queues.iter().map(|q| q.went.map(Nanos::as_i64)))
            .into_column(),
    ];
    DataFrame::new(queues.len(), frame)
}

/// The queues in a frame that has the columns of [`columns::QUEUES`], with their numbers.
pub(crate) fn queues_from_frame(frame: &DataFrame) -> PolarsResult<Vec<(QueueId, Queue)>> {
    let number = frame.column("queue")?.u32()?;
    let subsystem_nqn = frame.column("subsystem_nqn")?.str()?;
    let host_nqn = frame.column("host_nqn")?.str()?;
    let cntlid = frame.column("cntlid")?.u16()?;
    let qid = frame.column("qid")?.u16()?;
    let transport = frame.column("transport")?.str()?;
    let host_address = frame.column("host_address")?.str()?;
    let host_port = frame.column("host_port")?.u16()?;
    let target_address = frame.column("target_address")?.str()?;
    let target_port = frame.column("target_port")?.u16()?;
    let device = frame.column("device")?.str()?;
    let served_by = frame.column("served_by")?.str()?;
    let came = frame.column("came")?.i64()?;
    let existed = frame.column("existed")?.bool()?;
    let went = frame.column("went")?.i64()?;

    let endpoint = |address: Option<&str>, port: Option<u16>| {
        Some(Endpoint { address: address?.to_owned(), port: port? })
    };
    let nanos = |t: i64| Nanos(u64::try_from(t).unwrap_or(0));
    Ok((0..frame.height())
        .map(|i| {
            let queue = Queue {
                subsystem_nqn: subsystem_nqn.get(i).unwrap_or_default().to_owned(),
                host_nqn: host_nqn.get(i).unwrap_or_default().to_owned(),
                cntlid: cntlid.get(i).unwrap_or_default(),
                qid: qid.get(i).unwrap_or_default(),
                transport: transport.get(i).and_then(Transport::parse).unwrap_or_default(),
                host: endpoint(host_address.get(i), host_port.get(i)),
                target: endpoint(target_address.get(i), target_port.get(i)),
                device: device.get(i).map(str::to_owned),
                served_by: served_by.get(i).map(str::to_owned),
                came: nanos(came.get(i).unwrap_or_default()),
                existed: existed.get(i).unwrap_or_default(),
                went: went.get(i).map(nanos),
            };
            (QueueId(number.get(i).unwrap_or_default()), queue)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::{Batch, queues_from_frame, queues_to_frame};
    use crate::{Command, Endpoint, Nanos, Queue, Side, columns};

    #[test]
    fn a_batch_has_exactly_the_columns_of_the_table() {
        for side in [Side::Host, Side::Target] {
            let mut batch = Batch::new(side);
            batch.push(&Command::default());
            let frame = batch.to_frame().unwrap();
            assert_eq!(**frame.schema(), columns::schema(&columns::commands(side)));
        }
    }

    #[test]
    fn queues_have_the_columns_of_the_table_and_come_back_whole() {
        let queues = vec![
            Queue::default(),
            Queue {
                subsystem_nqn: "nqn.2016-06.io.spdk:cnode1".into(),
                cntlid: 1,
                qid: 2,
                host: Some(Endpoint { address: "::1".into(), port: 40000 }),
                device: Some("nvme0".into()),
                came: Nanos(5),
                went: Some(Nanos(9)),
                existed: true,
                ..Queue::default()
            },
        ];
        let frame = queues_to_frame(&queues).unwrap();
        assert_eq!(**frame.schema(), columns::schema(columns::QUEUES));
        let back: Vec<Queue> = queues_from_frame(&frame).unwrap().into_iter().map(|(_, q)| q).collect();
        assert_eq!(back, queues);
    }
}
