//! Files and directories into the box and out of it.

use std::io;
use std::path::Path;

use runtime_core::{ByteStream, Content, Error, Result, View, WriteOptions, stream_error};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::plan::{Copy, Plan};

/// Copies a directory's content, or one file with its mode, into the box.
pub(super) async fn upload(sandbox: &View, plan: &Plan, copy: &Copy) -> Result<()> {
    let to = plan.in_box(&copy.to);
    let at = |error: io::Error| Error::io(copy.from.display(), error).with_field("upload");
    let metadata = tokio::fs::metadata(&copy.from).await.map_err(at)?;
    if metadata.is_dir() {
        return sandbox.upload_dir(&copy.from, &to).await;
    }
    use std::os::unix::fs::PermissionsExt;
    let options = WriteOptions::mode(metadata.permissions().mode() & 0o777);
    let file = tokio::fs::File::open(&copy.from).await.map_err(at)?;
    sandbox
        .write_with(&to, Content::Stream(ByteStream::new(file)), options)
        .await
}

/// Copies a directory or a file out of the box. A symbolic link is taken for the file that it points to.
pub(super) async fn download(sandbox: &View, plan: &Plan, copy: &Copy) -> Result<()> {
    let from = plan.in_box(&copy.from);
    let metadata = sandbox.stat(&from).await?;
    if metadata.is_dir() {
        return sandbox.download_dir(&from, &copy.to).await;
    }
    let stream = sandbox.open(&from).await?;
    let name = copy.from.file_name().unwrap_or_default();
    let names_directory = copy.to.as_os_str().as_encoded_bytes().ends_with(b"/");
    let to = match names_directory || copy.to.is_dir() {
        true => copy.to.join(name),
        false => copy.to.clone(),
    };
    let mode = metadata.mode.filter(|_| metadata.is_file());
    let saved = save(stream, &to, mode).await;
    saved.map_err(|error| error.with_operation(format!("download {}", copy.from.display())))
}

/// Writes beside the target and renames, so that a download that is cut short leaves what was there.
async fn save(mut stream: ByteStream, to: &Path, mode: Option<u32>) -> Result<()> {
    let at = |error: io::Error| Error::io(format_args!("writing {}", to.display()), error);
    let parent = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    tokio::fs::create_dir_all(parent).await.map_err(at)?;
    let mut builder = tempfile::Builder::new();
    use std::os::unix::fs::PermissionsExt;
    // Neither setuid nor anything else above the nine bits comes out of a box.
    let permissions = std::fs::Permissions::from_mode(mode.unwrap_or(0o644) & 0o777);
    let (file, path) = builder
        .prefix(".download-")
        .tempfile_in(parent)
        .map_err(at)?
        .into_parts();
    let mut file = tokio::fs::File::from_std(file);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = stream
            .read(&mut buffer)
            .await
            .map_err(|error| stream_error("reading from the box", error))?;
        if count == 0 {
            break;
        }
        file.write_all(&buffer[..count]).await.map_err(at)?;
    }
    file.flush().await.map_err(at)?;
    file.set_permissions(permissions).await.map_err(at)?;
    drop(file);
    path.persist(to).map_err(|error| at(error.error))
}
