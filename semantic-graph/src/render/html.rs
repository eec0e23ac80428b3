//! The page.

use std::fmt::Write;

use super::RenderOptions;
use super::svg::{Picture, STYLE};
use super::text::{script_string, xml};
use crate::message::{Content, Message, Part};
use crate::node::MessageNode;
use crate::trace::Trace;

/// Most characters of a message that the page holds.
const MAX_MESSAGE: usize = 1500;

/// Most tokens of a message that the page holds.
const MAX_TOKENS: usize = 48;

const PAGE_STYLE: &str = "\
html,body{margin:0;height:100%}\
body{display:flex;flex-direction:column;font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;\
color:#1f2933}\
header{padding:8px 14px;border-bottom:1px solid #e3e6ea;display:flex;flex-wrap:wrap;\
gap:4px 14px;align-items:center;background:#fff}\
header b{font-size:14px}header .c{color:#5b6470}\
header label{display:inline-flex;gap:5px;align-items:center;cursor:pointer}\
header .k{display:inline-block;width:22px;height:0;border-top:3px solid}\
header .q{display:inline-block;width:14px;height:11px;border:1px solid;border-radius:3px}\
header button{font:inherit;padding:1px 9px}\
main{flex:1;overflow:auto;cursor:grab}main.drag{cursor:grabbing}\
#tip{position:fixed;display:none;max-width:560px;max-height:70vh;overflow:hidden;background:#fff;\
border:1px solid #9aa3ad;border-radius:6px;box-shadow:0 4px 16px #0003;padding:8px 11px;\
pointer-events:none;z-index:2}\
#tip h4{margin:0 0 4px;font-size:12px;color:#5b6470}\
#tip pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:12px/1.35 ui-monospace,\
Menlo,Consolas,monospace}\
#tip .tk{margin-top:6px;font:11px/1.6 ui-monospace,Menlo,Consolas,monospace;color:#5b6470}\
#tip .tk b{color:#1d4ed8;background:#dbeafe;border-radius:3px;padding:0 2px}\
.n{cursor:default}.dim .l{opacity:.05}.dim .n{opacity:.35}\
.dim .l.on{opacity:1;stroke-width:2.6}.dim .n.on{opacity:1}\
.n.me rect{stroke:#111;stroke-width:2}";

const SCRIPT: &str = r##"
const main=document.querySelector('main'),svg=main.querySelector('svg'),tip=document.getElementById('tip');
const W=+svg.getAttribute('width'),H=+svg.getAttribute('height');let zoom=1;
const nodes=[];for(const g of svg.querySelectorAll('.n'))nodes[+g.dataset.n]=g;
const at=[];for(const p of svg.querySelectorAll('.l')){for(const e of new Set([+p.dataset.s,+p.dataset.t]))(at[e]??=[]).push(p)}
function scale(z,x=main.clientWidth/2,y=main.clientHeight/2){z=Math.min(4,Math.max(.02,z));
const px=(main.scrollLeft+x)/zoom,py=(main.scrollTop+y)/zoom;zoom=z;
svg.setAttribute('width',W*z);svg.setAttribute('height',H*z);
main.scrollLeft=px*z-x;main.scrollTop=py*z-y}
document.getElementById('in').onclick=()=>scale(zoom*1.25);
document.getElementById('out').onclick=()=>scale(zoom/1.25);
document.getElementById('one').onclick=()=>scale(1);
document.getElementById('fit').onclick=()=>scale(Math.min(main.clientWidth/W,main.clientHeight/H));
main.addEventListener('wheel',e=>{if(e.ctrlKey||e.metaKey){e.preventDefault();
const r=main.getBoundingClientRect();scale(zoom*(e.deltaY<0?1.15:1/1.15),e.clientX-r.left,e.clientY-r.top)}},{passive:false});
let drag=null;main.addEventListener('pointerdown',e=>{if(e.button===0){drag=[e.clientX,e.clientY,main.scrollLeft,main.scrollTop];main.classList.add('drag')}});
addEventListener('pointermove',e=>{if(drag){main.scrollLeft=drag[2]+drag[0]-e.clientX;main.scrollTop=drag[3]+drag[1]-e.clientY}});
addEventListener('pointerup',()=>{drag=null;main.classList.remove('drag')});
let lit=[];function off(){for(const e of lit)e.classList.remove('on','me');lit=[];svg.classList.remove('dim');tip.style.display='none'}
function show(n,e){off();const g=nodes[n];g.classList.add('on','me');lit.push(g);
for(const p of at[n]||[]){p.classList.add('on');lit.push(p);const o=nodes[+p.dataset.s===n?+p.dataset.t:+p.dataset.s];o.classList.add('on');lit.push(o)}
if(at[n])svg.classList.add('dim');
const [head,text,tokens]=DATA[n];tip.replaceChildren();
const h=document.createElement('h4');h.textContent=head;tip.append(h);
if(text){const p=document.createElement('pre');p.textContent=text;tip.append(p)}
if(tokens){const d=document.createElement('div');d.className='tk';
for(const t of tokens.split(' ')){const s=t[0]==='*';const b=document.createElement(s?'b':'span');b.textContent=s?t.slice(1):t;d.append(b,' ')}tip.append(d)}
tip.style.display='block';const w=tip.offsetWidth,k=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(e.clientX+16,innerWidth-w-8))+'px';
tip.style.top=Math.max(4,Math.min(e.clientY+16,innerHeight-k-8))+'px'}
svg.addEventListener('pointerover',e=>{if(drag)return;const g=e.target.closest('.n');if(g)show(+g.dataset.n,e);else off()});
main.addEventListener('pointerleave',off);
for(const c of document.querySelectorAll('header input'))c.onchange=()=>{
for(const p of svg.querySelectorAll('.l'+c.value))p.style.display=c.checked?'':'none'};
const hash=/^#n(\d+)$/.exec(location.hash);if(hash&&nodes[+hash[1]]){const n=+hash[1],b=nodes[n].getBBox();
main.scrollLeft=b.x-main.clientWidth/2;main.scrollTop=b.y-main.clientHeight/3;
const r=nodes[n].getBoundingClientRect();show(n,{clientX:r.right,clientY:r.bottom})}
"##;

pub(super) fn html(trace: &Trace, options: &RenderOptions) -> String {
    let mut picture = Picture::new(trace, options);
    let content = picture.content(false);
    let (width, height) = (picture.width(), picture.height());
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n",
    );
    let _ = writeln!(
        out,
        "<title>{}</title><style>{STYLE}{PAGE_STYLE}</style></head><body>",
        xml(&trace.id)
    );
    header(&mut out, trace, &picture);
    let _ = writeln!(
        out,
        "<main><svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">"
    );
    out.push_str(&content);
    out.push_str("</svg></main><div id=\"tip\"></div>\n<script>const DATA=[\n");
    for (i, node) in trace.nodes().iter().enumerate() {
        details(&mut out, i, node);
    }
    out.push_str("];");
    out.push_str(SCRIPT);
    out.push_str("</script></body></html>\n");
    out
}

fn header(out: &mut String, trace: &Trace, picture: &Picture<'_>) {
    let _ = writeln!(
        out,
        "<header><b>{}</b><span class=\"c\">{} messages · {} turns · {} branches · {} links · {} \
         loops</span><span><button id=\"out\">−</button><button id=\"in\">+</button>\
         <button id=\"one\">100%</button><button id=\"fit\">fit</button></span>",
        xml(&trace.id),
        trace.nodes().len(),
        trace.num_turns(),
        trace.num_branches(),
        picture.links,
        picture.loops
    );
    for (i, (label, colour)) in picture.labels.iter().enumerate() {
        let _ = writeln!(
            out,
            "<label><input type=\"checkbox\" value=\"{i}\" checked><span class=\"k\" \
             style=\"border-color:{colour}\"></span>{label}</label>"
        );
    }
    for (name, fill, stroke) in [
        ("system", "#ede9fe", "#b9acf0"),
        ("user", "#fff", "#aab4bf"),
        ("sampled", "#dbeafe", "#5b93e8"),
        ("tool", "#fef3c7", "#d9b34a"),
        ("not trained", "#d9dce0", "#8b929a"),
    ] {
        let _ = writeln!(
            out,
            "<span class=\"c\"><span class=\"q\" style=\"background:{fill};border-color:{stroke}\">\
             </span> {name}</span>"
        );
    }
    out.push_str("<span class=\"c\">dashed: part of a loop</span></header>\n");
}

/// Heading, text and tokens of one message.
fn details(out: &mut String, index: usize, node: &MessageNode) {
    let tokens = node.tokens();
    let mut head = format!("{index} {}", node.message.role());
    if node.sampled {
        head.push_str(" · sampled");
    }
    if !tokens.token_ids.is_empty() {
        let _ = write!(
            head,
            " · {} tokens, {} sampled",
            tokens.token_ids.len(),
            tokens.sampled_len()
        );
    }
    for link in &node.semantic_parents {
        if head.len() > 300 {
            head.push_str(" …");
            break;
        }
        let _ = write!(head, " · {} from {}", link.label, link.node);
    }
    let mut list = String::new();
    let mut logprobs = tokens.logprobs.iter();
    for (i, id) in tokens.token_ids.iter().take(MAX_TOKENS).enumerate() {
        if i > 0 {
            list.push(' ');
        }
        if tokens.mask.get(i) == Some(&true) {
            match logprobs.next() {
                Some(logprob) => {
                    let _ = write!(list, "*{id}({logprob:.2})");
                }
                None => {
                    let _ = write!(list, "*{id}");
                }
            }
        } else {
            let _ = write!(list, "{id}");
        }
    }
    if tokens.token_ids.len() > MAX_TOKENS {
        list.push_str(" …");
    }
    let _ = writeln!(
        out,
        "[{},{},{}],",
        script_string(&head),
        script_string(&whole_text(&node.message)),
        script_string(&list)
    );
}

/// Everything a message says, up to the page's limit.
fn whole_text(message: &Message) -> String {
    let mut parts: Vec<String> = Vec::new();
    if let Message::Assistant(message) = message
        && let Some(reasoning) = &message.reasoning_content
    {
        parts.push(format!("[reasoning] {}", limited(reasoning)));
    }
    let content = match message {
        Message::System { content } | Message::User { content } => Some(content),
        Message::Tool(message) => Some(&message.content),
        Message::Assistant(_) => None,
    };
    match content {
        Some(Content::Parts(list)) => {
            for part in list.iter().take(20) {
                parts.push(match part {
                    Part::Text(text) => limited(text),
                    Part::ImageUrl(url) => {
                        format!("[image {}]", url.chars().take(60).collect::<String>())
                    }
                });
            }
        }
        _ => parts.push(limited(&message.text())),
    }
    for call in message.tool_calls().iter().take(20) {
        parts.push(format!("→ {}({})", call.name, limited(&call.arguments)));
    }
    limited(&parts.join("\n"))
}

fn limited(text: &str) -> String {
    match text.char_indices().nth(MAX_MESSAGE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
